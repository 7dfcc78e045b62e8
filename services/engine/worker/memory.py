"""Main memory: what this process may still take, what it holds, what a piece of work takes at its peak.

Free is what the machine has and what every control group around the process has left, whichever is less: a container's
limit counts. Held is anonymous memory; pages of a mapped file are the system's to take back. Linux only. Called by
`budget` and `profile` at start-up and by a worker between steps.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OWN_PAGES, _LINE_BYTES = "/proc/self/statm", 256
_COUNTING_BYTES = 2**20
"""The system counts a process's pages in batches, one for each processor: what it says may be that far off."""
_AHEAD_BYTES = 128 * 2**10
"""The system reads no more ahead at a time than a device's setting says, whatever is asked; this is the usual one."""
_RESET_PEAK = "5"
"""What `clear_refs` takes to begin the peak anew, proc(5)."""


def free_bytes() -> int:
    """Memory that can be taken without another process being killed for it."""
    free = _field(PROC / "meminfo", "MemAvailable:") * 1024
    return min([free, *(max(0, limit - used) for limit, used in _control_groups())])


def held_bytes() -> int:
    """Anonymous memory of this process."""
    # Steps ask for it: no more than three system calls.
    file = os.open(_OWN_PAGES, os.O_RDONLY)
    try:
        _, resident, shared = os.read(file, _LINE_BYTES).split()[:3]
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * _PAGE_BYTES


def peak_growth(work: Callable[[], object]) -> int:
    """By how many bytes the process is larger than now, at most, while `work` runs.

    Free pages of the heap are given back first, so that what the work takes from them counts. Where the system does not
    let the peak begin anew, it is that of the whole life: more than the work takes, never less.
    """
    return_free_heap()
    before = _field(PROC / "self/status", "VmRSS:")
    with contextlib.suppress(OSError):
        (PROC / "self/clear_refs").write_text(_RESET_PEAK)
    work()
    return max(0, _field(PROC / "self/status", "VmHWM:") - before) * 1024 + _COUNTING_BYTES


def return_free_heap() -> None:
    """Gives the heap's free pages back to the system. A C library other than glibc may have no such call."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def fetch(address: int, size: int) -> None:
    """Has the system begin to read what a file is mapped to: bit by bit it would come, and be waited for, when needed.

    It is advice: memory that is no file's stays as it is.
    """
    first, end = address // _PAGE_BYTES * _PAGE_BYTES, address + size
    for place in range(first, end, _AHEAD_BYTES):
        length = min(_AHEAD_BYTES, end - place)
        _libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(length), mmap.MADV_WILLNEED)


class HeapGuard:
    """Keeps what freed tensors leave behind in the heap from adding up.

    The heap holds on to most of what a step frees, in pieces that the next one, of another shape, may not fit into.
    Giving all of it back after every step would cost a third of a small model's prefill in page faults; so it is given
    back whenever the process has grown by `most_bytes` since the last time. Pages of the cache that are touched for the
    first time are growth too, but only once.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._mark = held_bytes() + most_bytes

    def after_step(self) -> None:
        """Called between steps, while nothing of one is alive."""
        if held_bytes() > self._mark:
            return_free_heap()
            self._mark = held_bytes() + self._most


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """What a version of control groups calls its files."""

    root: Path
    limit: str
    used: str
    cold: str
    """Name in `memory.stat` of the file pages that nobody uses: the system drops them before it refuses anything."""


def _control_groups() -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each control group with a limit that this process is in."""
    for folder, files in _group_folders():
        limit, used = _integer(folder / files.limit), _integer(folder / files.used)
        if limit is not None and used is not None:
            yield limit, used - min(used, _field(folder / "memory.stat", files.cold, missing=0))


def _group_folders() -> Iterator[tuple[Path, _GroupFiles]]:
    """The folder of each group around this process. Inside a container the outermost is the container's own."""
    for line in _text(PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = _GroupFiles(CONTROL_GROUPS, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            files = _GroupFiles(CONTROL_GROUPS / "memory", *names)
        else:
            continue
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield files.root / folder, files


def _field(path: Path, name: str, missing: int | None = None) -> int:
    """The number behind a name in a file of names and numbers."""
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    assert missing is not None, f"{path} has no {name}"
    return missing


def _integer(path: Path) -> int | None:
    """The number in a file; None where there is no file or it says `max`."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


_libc = ctypes.CDLL(None)
