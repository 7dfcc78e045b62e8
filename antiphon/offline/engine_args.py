"""`EngineArgs`: the settings of an engine that is created in a Python program.

These are the settings of the engine service (`shared.config.EngineSettings`) and a few that the service does not have.
"""

import difflib
import warnings
from dataclasses import dataclass, fields
from typing import Any

from antiphon.offline.inputs import NO_PICTURES
from antiphon.settings import ServeSettings
from shared import parallel
from shared.config import BusSettings, EngineSettings, changed, flag, validated
from shared.other_options import BY_NAME, Other

_GROUP = "offline"
_FORMER = "max_context_len_to_capture"


@dataclass(frozen=True, kw_only=True)
class EngineArgs(EngineSettings):
    """The settings of an engine. A field has the name of the setting's flag, with underscores.

    `engine_args` creates an object from keyword arguments and checks them.
    """

    seed: int = flag(0, "gives requests without a seed one, by their order: the same in each run", group=_GROUP)
    enforce_eager: bool = changed(EngineSettings, "enforce_eager", False)
    advice_spelling: str = changed(EngineSettings, "advice_spelling", "arguments")

    def settings(self) -> EngineSettings:
        """Returns the settings that the engine reads."""
        return EngineSettings(**{item.name: getattr(self, item.name) for item in fields(EngineSettings)})


def engine_args(**values: Any) -> EngineArgs:
    """Checks keyword arguments and returns them as `EngineArgs`. A value of None means the default.

    Raises TypeError for an unknown name or a value of the wrong type, ValueError for an unsupported value. Warns of
    arguments that have no effect or are deprecated.
    """
    known, of_server = _names(EngineArgs), _names(BusSettings) | (_names(ServeSettings) - _names(EngineArgs))
    for name, value in values.items():
        other = BY_NAME.get(_option(name))
        if other is not None:
            _answer(name, value, other)
        elif name in of_server and value is not None:
            warnings.warn(f"{name!r} has no effect: there is no server in this process", stacklevel=3)
        elif name not in known | of_server:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise TypeError(f"unknown argument {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    if values.get(_FORMER) is not None:
        warnings.warn(f"'{_FORMER}' is deprecated: use 'max_seq_len_to_capture'", DeprecationWarning, stacklevel=3)
    if values.get("role") not in (None, "both"):
        raise ValueError(
            f"role={values['role']!r} needs other engines, and there are none in this process: leave it out"
        )
    if values.get("enable_mm"):
        raise ValueError(f"enable_mm=True: {NO_PICTURES}")
    args = validated(EngineArgs, {name: value for name, value in values.items() if name in known})
    if args.nnode > 1:
        raise ValueError(
            f"nnode {args.nnode}: a model in a Python program is on the devices of one machine, or of a Ray cluster "
            "(distributed_executor_backend='ray'); for several machines without Ray use `antiphon serve`"
        )
    parallel.check(args, str)
    for notice in parallel.notices(args, str):
        warnings.warn(notice, stacklevel=3)
    return args


def _answer(name: str, value: Any, other: Other) -> None:
    """Raises or warns as the server's command line does for the option of another server with that name."""
    if value is None or value is False or str(value).lower() in other.asks_nothing:
        return
    if other.refused:
        raise ValueError(f"{name}={value!r} {other.because}.")
    warnings.warn(f"{name!r} {other.because}", stacklevel=4)


def _names(kind: type[Any]) -> set[str]:
    return {item.name for item in fields(kind)}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
