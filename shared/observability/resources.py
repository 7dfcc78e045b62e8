"""Processor time, memory and GPUs of this process and of the processes that it has started.

Whoever starts a process, or chooses a GPU, says so here; heartbeats carry what `read` returns. Linux only: on other
systems `read` returns None. State of the process, because so are processor time and memory.
"""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from antiphon.shared.messages import DeviceMemory, ProcessResources

GPU_INTERVAL_S = 1.0
"""A GPU is asked for its memory at most this often: the driver takes up to a millisecond."""
_OWN_PAGES = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_children: set[int] = set()
_remote_gpus: dict[int, tuple[DeviceMemory, ...]] = {}
"""By process: the GPUs of children, which say themselves what is used."""
_gpus: dict[int, Callable[[], DeviceMemory]] = {}
_gpus_read: tuple[float, tuple[DeviceMemory, ...]] = (-GPU_INTERVAL_S, ())


class Cuda(Protocol):
    """What is used of torch.cuda, which `shared` does not import."""

    def get_device_name(self, device: Any) -> str:
        """Returns the name of the product."""
        ...

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        """Returns the free and all bytes of a device. May be called from any thread."""
        ...


def add_child(pid: int) -> None:
    """Counts a child process from now on."""
    _children.add(pid)


def remove_child(pid: int) -> None:
    """Ends the counting of a child that has been waited for. Its processor time stays counted."""
    _children.discard(pid)
    _remote_gpus.pop(pid, None)


def add_gpu(cuda: Cuda, index: int) -> None:
    """Names a GPU on which this process computes. `cuda` is torch.cuda; `index` is torch's number of the device."""
    name, number = str(cuda.get_device_name(index)), _machine_number(index)

    def memory() -> DeviceMemory:
        free, total = cuda.mem_get_info(index)
        return DeviceMemory(index=number, name=name, used_bytes=total - free, total_bytes=total)

    _gpus[index] = memory


def set_gpus_of_child(pid: int, found: tuple[DeviceMemory, ...]) -> None:
    """Records what a child has read of its own GPUs."""
    if pid in _children:
        _remote_gpus[pid] = found


def read() -> ProcessResources | None:
    """Returns what is used now; None if the system does not say. Takes about 20 µs, and 15 µs for each child."""
    try:
        with _OWN_PAGES.open("rb") as file:
            rss = int(file.read().split()[1])
        num_cores = len(os.sched_getaffinity(0))
    except (OSError, AttributeError):
        return None
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    for pid in tuple(_children):
        child_cpu_s, child_pages = _read_child(pid)
        cpu_s, rss = cpu_s + child_cpu_s, rss + child_pages
    return ProcessResources(cpu_s=cpu_s, num_cores=num_cores, rss_bytes=rss * _PAGE_BYTES, gpus=gpus())


def gpus() -> tuple[DeviceMemory, ...]:
    """Returns the GPUs of this process and of its children, each at most GPU_INTERVAL_S old."""
    global _gpus_read
    if not _gpus and not _remote_gpus:
        return ()
    now = time.monotonic()
    if now - _gpus_read[0] >= GPU_INTERVAL_S:
        _gpus_read = now, tuple(read_memory() for read_memory in _gpus.values())
    known = {gpu.index: gpu for one in (*tuple(_remote_gpus.values()), _gpus_read[1]) for gpu in one}
    return tuple(known[index] for index in sorted(known))


def _read_child(pid: int) -> tuple[float, int]:
    """Returns a child's processor seconds, and its resident pages that it shares with nobody; 0 if it is gone."""
    try:
        # The name, in parentheses, may have spaces. utime and stime are the fields 14 and 15.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        pages = [int(word) for word in Path(f"/proc/{pid}/statm").read_bytes().split()]
    except OSError:
        return 0.0, 0
    return (int(fields[11]) + int(fields[12])) * _TICK_S, pages[1] - pages[2]


def _machine_number(index: int) -> int:
    """Returns the number of a GPU on its machine: CUDA_VISIBLE_DEVICES renumbers them for the process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = visible[index].strip() if index < len(visible) else ""
    return int(named) if named.isdigit() else index
