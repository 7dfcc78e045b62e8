"""Counts the machine's GPUs without importing a GPU library, and assigns a GPU to each engine.

Called by the launcher before it starts any process. An engine that is started alone (`antiphon service engine`) chooses
its device itself.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.shared.flags import SettingsError

VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICE_FILES = Path("/dev")
_DEVICE_FILE = re.compile(r"nvidia\d+")
_OTHER_FILES = ("dxg", "kfd", "nvmap", "nvhost-gpu")
"""Device files of GPUs under WSL, of AMD's, and of NVIDIA's integrated ones."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of GPUs to engines.

    `ids` has the value of CUDA_VISIBLE_DEVICES for each engine; it is empty if engines choose their device themselves.
    `notices` are messages for the user.
    """

    ids: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def visible(environ: Mapping[str, str], files: Path = DEVICE_FILES) -> list[str]:
    """Returns the number or id of each GPU that a process with this environment may use."""
    if VARIABLE in environ:
        named = [word.strip() for word in environ[VARIABLE].split(",")]
        # As in CUDA, the first invalid entry ends the list.
        end = next((index for index, word in enumerate(named) if word in ("", "-1")), len(named))
        return named[:end]
    found = [path for path in files.glob("nvidia*") if _DEVICE_FILE.fullmatch(path.name)]
    return [str(index) for index in range(len(found))]


def may_have_gpus(environ: Mapping[str, str], files: Path = DEVICE_FILES) -> bool:
    """Whether a process with this environment may find a GPU.

    False only if there is certainly none: the environment hides them, or the machine has no file of one.
    """
    hidden = VARIABLE in environ and not visible(environ)
    return not hidden and (bool(visible({}, files)) or any((files / name).exists() for name in _OTHER_FILES))


def on_cpu(device: str, environ: Mapping[str, str]) -> bool:
    """Whether engines compute on the CPU. `device` is the value of the setting `--device`."""
    return device == "cpu" or (device == "auto" and not visible(environ))


def usable(device: str, environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs that engines may use, 0 on the CPU; at least 1 if `device` demands a GPU."""
    return 0 if on_cpu(device, environ) else max(1, len(visible(environ)))


def for_engines(needed: Sequence[int], device: str, gpus: Sequence[str]) -> Assignment:
    """Assigns GPUs to engines (of all models), of which each needs `needed`. Raises SettingsError if there are too few.

    `device` is the value of the setting `--device`. With `--device=cpu`, without GPUs, or with a single engine, no GPU
    is assigned and `ids` is empty.
    """
    if device == "cpu" or not gpus:
        return Assignment()
    engines, total = len(needed), sum(needed)
    if total > len(gpus):
        each = "a GPU each" if total == engines else f"{total} GPUs"
        raise SettingsError(
            f"--engines (--worker-num): {engines} engines need {each}, and {len(gpus)} can be used here. Start "
            f"{len(gpus) // max(needed)}, or compute on the CPU with --device=cpu."
        )
    unused = len(gpus) - total
    message = f"{unused} of {len(gpus)} GPUs stay unused: {engines} engines are started (--engines, --worker-num)"
    notices = (message,) if unused else ()
    ids = tuple(",".join(gpus[sum(needed[:i]) : sum(needed[: i + 1])]) for i in range(engines))
    return Assignment(ids if engines > 1 else (), notices)


def beside(needed: Sequence[int], gpus: Sequence[str], used: Iterable[str]) -> tuple[str, ...]:
    """Assigns GPUs to engines that are started while others run, of which each needs `needed` (see `for_engines`).

    `used`: the GPUs of the running engines, each as often as it is used. The least used ones are taken, so that GPUs
    are shared only if there are no others. Raises SettingsError if there are too few for one engine.
    """
    users = Counter(dict.fromkeys(gpus, 0))
    users.update(gpu for gpu in used if gpu in users)
    ids: list[str] = []
    for count in needed:
        if count > len(gpus):
            raise SettingsError(
                f"--tensor-parallel-size: an engine needs {count} GPUs, and {len(gpus)} can be used here"
            )
        own = sorted(gpus, key=lambda gpu: (users[gpu], gpus.index(gpu)))[:count]
        users.update(own)
        ids.append(",".join(own))
    return tuple(ids)
