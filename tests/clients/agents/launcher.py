"""The command `antiphon`, whose engines are those of a module: `python -m tests.clients.agents.launcher serve …`.

The module is named by the environment: `mortal_engine` for a model, `scripted_engine` for none.
"""

import os
import sys
from dataclasses import replace
from typing import Any

from antiphon.cli import main
from antiphon.launch import launcher
from antiphon.supervision.processes import ChildSpec

ENGINE = "AGENTS_ENGINE"


def install(module: str) -> None:
    """Has the launcher start the module wherever it starts an engine."""
    service_spec = launcher.service_spec

    def with_module(*given: Any, **named: Any) -> ChildSpec:
        spec = service_spec(*given, **named)
        argv = [module if word == "antiphon.services.engine" else word for word in spec.argv]
        return replace(spec, argv=argv, standby_argv=())

    launcher.service_spec = with_module


if __name__ == "__main__":
    install(os.environ[ENGINE])
    sys.exit(main())
