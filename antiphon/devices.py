"""The machine's GPUs, counted without loading what computes on them, and which engine gets which.

Called by the launcher before anything starts. An engine that is started alone chooses by itself.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.config import SettingsError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class Assignment:
    """`ids`: the GPU of each engine as the variable names it; empty where engines choose by themselves."""

    ids: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def visible(environ: Mapping[str, str], files: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process with this environment may use, by number or by id."""
    if VARIABLE in environ:
        named = [word.strip() for word in environ[VARIABLE].split(",")]
        # The first that is none ends the list: so CUDA reads it.
        end = next((index for index, word in enumerate(named) if word in ("", "-1")), len(named))
        return named[:end]
    found = [path for path in files.glob("nvidia*") if _DEVICE_FILE.fullmatch(path.name)]
    return [str(index) for index in range(len(found))]


def on_cpu(device: str, environ: Mapping[str, str]) -> bool:
    """Whether engines compute on the CPU. `device` is the setting."""
    return device == "cpu" or (device == "auto" and not visible(environ))


def for_engines(engines: int, device: str, gpus: Sequence[str]) -> Assignment:
    """One GPU for each engine, of whatever model. Raises SettingsError when there are fewer GPUs than engines.

    `device` is the setting. Without GPUs, or on a CPU by choice, and with one engine, there is nothing to share out.
    """
    if device == "cpu" or not gpus:
        return Assignment()
    if engines > len(gpus):
        raise SettingsError(
            f"--engines (--worker-num): {engines} engines need a GPU each, and {len(gpus)} can be used here. Start "
            f"{len(gpus)}, or compute on the CPU with --device=cpu."
        )
    unused = len(gpus) - engines
    told = f"{unused} of {len(gpus)} GPUs stay unused: {engines} engines are started (--engines, --worker-num)"
    notices = (told,) if unused else ()
    return Assignment(tuple(gpus[:engines]) if engines > 1 else (), notices)
