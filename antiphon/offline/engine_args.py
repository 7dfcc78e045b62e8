"""`EngineArgs`: the settings of an engine that is created in a Python program.

These are the settings of the engine service (`EngineSettings` in `shared/config.py`) and a few that the service lacks.
"""

import difflib
import json
import warnings
from collections.abc import Mapping
from typing import Any

from antiphon.settings import ServeSettings
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed import world
from antiphon.shared.flags import Settings, converted, flag, flags_of, validated
from antiphon.shared.models.image_models import image_limit, processor_kwargs
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.settings.other_options import BY_NAME, Other
from antiphon.shared.settings.speculation import speculation_settings

_FORMER = "max_context_len_to_capture"
_OBJECTS = ("hf_overrides", "mm_processor_kwargs", "limit_mm_per_prompt")


class EngineArgs(EngineSettings, group="offline"):
    """The settings of an engine. A field has the name of the setting's flag, with underscores.

    `engine_args` creates an object from keyword arguments and checks them.
    """

    seed: int = flag(0, "gives requests without a seed one, by their order: the same in each run")
    mm_processor_kwargs: str = flag("", "arguments of the image processor, as a dict or as JSON")
    limit_mm_per_prompt: str = flag("", "most images of a prompt, {'image': N}, as JSON, or image=N")
    advice_spelling: str = "arguments"

    def __getattr__(self, name: str) -> Any:
        """Returns the value of a setting of a group: a program reads an argument by the name by which it gave it."""
        for value in vars(self).values():
            if isinstance(value, Settings) and name in vars(value):
                return vars(value)[name]
        raise AttributeError(name)

    def settings(self) -> EngineSettings:
        """Returns the settings that the engine reads."""
        return converted(self, EngineSettings)


def engine_args(**values: Any) -> EngineArgs:
    """Checks keyword arguments and returns them as `EngineArgs`. A value of None means the default.

    Raises TypeError for an unknown name or a value of the wrong type, ValueError for an unsupported value. Warns of
    arguments that have no effect or are deprecated.
    """
    values = _by_field(values)
    if values.get("vision_device") not in (None, "cpu"):
        raise ValueError("vision_device: images are encoded on the CPU in this process: leave it out")
    known, of_server = _names(EngineArgs), _names(BusSettings) | (_names(ServeSettings) - _names(EngineArgs))
    for name, value in values.items():
        other = BY_NAME.get(_option(name))
        if other is not None and name not in known:
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
    values = {
        **values,
        **{name: json.dumps(values[name]) for name in _OBJECTS if isinstance(values.get(name), Mapping)},
    }
    args = validated(EngineArgs, {name: value for name, value in values.items() if name in known})
    _check_images(args)
    world.check(args.parallel, str)
    if args.parallel.nnode > 1:
        raise ValueError(
            f"nnode {args.parallel.nnode}: a model in a Python program is on the devices of one machine, or of a Ray "
            "cluster (distributed_executor_backend='ray'); for several machines without Ray use `antiphon serve`"
        )
    for notice in world.notices(args.parallel, str):
        warnings.warn(notice, stacklevel=3)
    return args


def _by_field(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments by the names of fields: an argument may have each name of the setting's flag.

    Raises TypeError for an argument that is given by two names.
    """
    found = dict(values)
    for item in (*flags_of(EngineArgs), *flags_of(ServeSettings)):
        others = (*item.metadata["alias"], *item.metadata["hidden"])
        for name in (other.removeprefix("--").replace("-", "_") for other in others if other[:2] == "--"):
            value = found.pop(name, None)
            if value is None:
                continue
            if found.get(item.name) not in (None, "", item.default, value):
                raise TypeError(f"{name!r} is another name of {item.name!r}: give one of them")
            found[item.name] = value
    if found.pop("worker_use_ray", None):
        found["distributed_executor_backend"] = "ray"
    speculation = found.get("speculative_config")
    if read := speculation_settings(json.dumps(speculation)) if isinstance(speculation, Mapping) else {}:
        del found["speculative_config"]
        found |= read
    return found


def _check_images(args: EngineArgs) -> None:
    """Raises ValueError for invalid settings of image input."""
    if processor_kwargs(args.mm_processor_kwargs) and not args.enable_mm:
        raise ValueError("mm_processor_kwargs needs enable_mm=True: without it no images are taken")
    image_limit(args.limit_mm_per_prompt, "limit_mm_per_prompt")


def _answer(name: str, value: Any, other: Other) -> None:
    """Raises or warns, as the server's command line does, for an option of another server."""
    if value is None or value is False or str(value).lower() in other.asks_nothing:
        return
    if other.refused:
        raise ValueError(f"{name}={value!r} {other.because}.")
    warnings.warn(f"{name!r} {other.because}", stacklevel=4)


def _names(kind: type[Settings]) -> set[str]:
    return {item.name for item in flags_of(kind)}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
