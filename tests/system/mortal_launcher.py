"""The command `antiphon`, whose engines can be told when to die: `python -m tests.system.mortal_launcher serve …`."""

import sys
from dataclasses import replace
from typing import Any

from antiphon.cli import main
from antiphon.launch import launcher
from antiphon.supervision.processes import ChildSpec


def install() -> None:
    """Has the launcher start `mortal_engine` wherever it starts an engine."""
    service_spec = launcher.service_spec

    def with_mortal_engine(*given: Any, **named: Any) -> ChildSpec:
        spec = service_spec(*given, **named)
        argv = ["tests.system.mortal_engine" if word == "antiphon.services.engine" else word for word in spec.argv]
        return replace(spec, argv=argv, standby_argv=())

    launcher.service_spec = with_mortal_engine


if __name__ == "__main__":
    install()
    sys.exit(main())
