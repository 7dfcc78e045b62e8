"""Measures main memory: the free memory, the memory of this process, and the peak of a function call.

Free memory is the minimum of the machine's available memory and the remaining limit of each control group (cgroup) of
the process, so a container's limit counts. Held memory is anonymous memory; pages of a mapped file are not counted,
because the system can reclaim them. Linux only. Called by the workers at start-up and between steps.
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
"""Margin for the system's page counters, which are updated in batches on each processor and may be off by this much."""
_AHEAD_BYTES = 128 * 2**10
"""Bytes of one read-ahead request. The kernel's limit per request is a device setting; this is the usual value."""
_RESET_PEAK = "5"
"""Value written to `clear_refs` to reset the peak, see proc(5)."""


def free_bytes() -> int:
    """Returns the bytes that can be allocated without running out of memory in the machine or a control group."""
    free = _field(PROC / "meminfo", "MemAvailable:") * 1024
    return min([free, *(max(0, limit - used) for limit, used in _control_groups())])


def held_bytes() -> int:
    """Returns the anonymous memory of this process, in bytes."""
    # Called between steps, so it must be cheap: three system calls.
    file = os.open(_OWN_PAGES, os.O_RDONLY)
    try:
        _, resident, shared = os.read(file, _LINE_BYTES).split()[:3]
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * _PAGE_BYTES


def peak_growth(work: Callable[[], object]) -> int:
    """Runs `work` and returns by how many bytes the process grows at its peak meanwhile.

    Free pages of the heap are returned to the system first, so that memory that the work takes from the heap counts. If
    the system does not allow the peak to be reset, the peak of the whole process is used: an overestimate, never too
    low.
    """
    return_free_heap()
    before = _field(PROC / "self/status", "VmRSS:")
    with contextlib.suppress(OSError):
        (PROC / "self/clear_refs").write_text(_RESET_PEAK)
    work()
    return max(0, _field(PROC / "self/status", "VmHWM:") - before) * 1024 + _COUNTING_BYTES


def return_free_heap() -> None:
    """Gives the heap's free pages back to the system. Does nothing if the C library has no `malloc_trim`."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def fetch(address: int, size: int) -> None:
    """Asks the system to read mapped pages of a file ahead, so that later accesses do not wait for the disk.

    This is only advice (madvise); it has no effect on memory that is not mapped from a file.
    """
    first, end = address // _PAGE_BYTES * _PAGE_BYTES, address + size
    for place in range(first, end, _AHEAD_BYTES):
        length = min(_AHEAD_BYTES, end - place)
        _libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(length), mmap.MADV_WILLNEED)


class HeapGuard:
    """Bounds the free memory that the heap keeps of freed tensors.

    The heap keeps most of the memory that a step frees, in fragments that may not fit the tensors of the next step,
    which have other shapes. Returning all of it after every step would cost a third of a small model's prefill time in
    page faults, so it is returned only when the process has grown by `most_bytes` since the last time. Pages of the KV
    cache that are written for the first time count as growth too, but only once.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._mark = held_bytes() + most_bytes

    def after_step(self) -> None:
        """Returns free pages to the system if the process has grown enough.

        Call it when no tensor of a step is alive.
        """
        if held_bytes() > self._mark:
            return_free_heap()
            self._mark = held_bytes() + self._most


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """The file names of a version of control groups."""

    root: Path
    limit: str
    used: str
    cold: str
    """Name in `memory.stat` of inactive file pages, which the system reclaims before it refuses an allocation."""


def _control_groups() -> Iterator[tuple[int, int]]:
    """Yields (limit, used), in bytes, of each control group of this process that has a limit."""
    for folder, files in _group_folders():
        limit, used = _integer(folder / files.limit), _integer(folder / files.used)
        if limit is not None and used is not None:
            yield limit, used - min(used, _field(folder / "memory.stat", files.cold, missing=0))


def _group_folders() -> Iterator[tuple[Path, _GroupFiles]]:
    """Yields the folder of each control group of this process. In a container the outermost is the container's own."""
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
    """Returns the number after `name` in a file of names and numbers; `missing` if the file does not have the name."""
    for line in _text(path).splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    assert missing is not None, f"{path} has no {name}"
    return missing


def _integer(path: Path) -> int | None:
    """Returns the number in a file; None if there is no file or it contains `max`."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


_libc = ctypes.CDLL(None)
