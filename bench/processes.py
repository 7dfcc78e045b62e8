"""What /proc says of a server's processes: their CPU time and memory, and stopping and continuing them all.

Knows nothing of servers or loads. Called by `bench.serving` and `bench.measure`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
IDLE_CORES = 0.1
"""A machine with less than this at work counts as idle."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process as it was when it was looked at."""

    pid: int
    parent: int
    cpu_s: float
    resident_mb: float
    command: str
    started: int
    """Ticks since the machine started: with the number, it names one process for ever."""


def tree(root: int) -> list[Process]:
    """A process and its living descendants."""
    processes = {process.pid: process for process in _all()}
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        if pid in processes:
            found.append(processes[pid])
        todo += [child.pid for child in processes.values() if child.parent == pid]
    return found


def pause(root: int) -> None:
    """Stops a process and its descendants until `resume`; twice over, for a child that came in between."""
    for _ in range(2):
        pause_all(tree(root))


def resume(root: int) -> None:
    """Lets them go on, children before parents: nobody may find those stopped that it waits for."""
    resume_all(tree(root))


def pause_all(family: list[Process]) -> None:
    """Stops these at once: to look for others takes milliseconds."""
    for process in family:
        _send(process.pid, signal.SIGSTOP)


def resume_all(family: list[Process]) -> None:
    """Lets these go on, in the order of `resume` where they are a `tree`."""
    for process in reversed(family):
        _send(process.pid, signal.SIGCONT)


def kill(root: int) -> None:
    """Ends a process and its descendants at once."""
    for process in reversed(tree(root)):
        _send(process.pid, signal.SIGKILL)


def end_orphans(family: list[Process]) -> None:
    """Ends those of an earlier `tree` that live on though their parent has ended."""
    wanted = {(process.pid, process.started) for process in family}
    for process in list(_all()):
        if (process.pid, process.started) in wanted:
            _send(process.pid, signal.SIGKILL)


def machine_busy_s() -> float:
    """CPU seconds of all cores since the start that were not idle, those that the host took away included."""
    values = [int(value) for value in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return (sum(values) - values[3] - values[4]) / TICKS


def wait_idle(limit_s: float, window_s: float = 1.0) -> bool:
    """Returns True when the machine has been idle for `window_s`, False after `limit_s` of waiting for that."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before, started = machine_busy_s(), time.monotonic()
        time.sleep(window_s)
        if machine_busy_s() - before < IDLE_CORES * (time.monotonic() - started):
            return True
    return False


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _all() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield _read(entry)
            except OSError:
                continue


def _read(entry: Path) -> Process:
    fields = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
    resident_mb = int(fields[21]) * PAGE / 2**20
    return Process(int(entry.name), int(fields[1]), cpu_s, resident_mb, command, int(fields[19]))
