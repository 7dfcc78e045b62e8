"""Reads CPU time and memory of a process and its descendants from /proc, and pauses, resumes and kills them.

Called by `cpu_accounting` and `moments` of this package, `bench.harness.serving` and `bench.run`.
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
_STILL = frozenset("TtZX")
"""States of a thread that is stopped, traced or has ended, see proc(5)."""
_LOOK_AGAIN_S = 0.0002
IDLE_CORES = 0.1
"""A machine on which fewer cores than this are busy counts as idle."""


@dataclass(frozen=True, slots=True)
class Process:
    """The state of one process at the time of reading."""

    pid: int
    parent: int
    cpu_s: float
    resident_mb: float
    command: str
    started: int
    """Start time in ticks after the machine's start. With `pid`, it identifies the process uniquely."""


def tree(root: int) -> list[Process]:
    """Returns a process and its living descendants."""
    processes = {process.pid: process for process in _all()}
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        if pid in processes:
            found.append(processes[pid])
        todo += [child.pid for child in processes.values() if child.parent == pid]
    return found


def pause(root: int) -> None:
    """Pauses a process and its descendants until `resume`. Does so twice, to pause also a child created meanwhile."""
    for _ in range(2):
        pause_all(tree(root))


def resume(root: int) -> None:
    """Resumes a process and its descendants, children first, so that no process waits for one that is still paused."""
    resume_all(tree(root))


def pause_all(family: list[Process]) -> None:
    """Pauses these processes and returns when all their threads stand still, which the signal alone does not ensure.

    New descendants are not searched for, because that would take milliseconds.
    """
    for process in family:
        _send(process.pid, signal.SIGSTOP)
    while any(_runs(process.pid) for process in family):
        time.sleep(_LOOK_AGAIN_S)


def resume_all(family: list[Process]) -> None:
    """Resumes these processes in reverse order, so that children of a `tree` are resumed before their parents."""
    for process in reversed(family):
        _send(process.pid, signal.SIGCONT)


def kill(root: int) -> None:
    """Kills a process and its descendants."""
    for process in reversed(tree(root)):
        _send(process.pid, signal.SIGKILL)


def end_orphans(family: list[Process]) -> None:
    """Kills those processes of an earlier `tree` that still exist after their parent has ended."""
    wanted = {(process.pid, process.started) for process in family}
    for process in list(_all()):
        if (process.pid, process.started) in wanted:
            _send(process.pid, signal.SIGKILL)


def machine_busy_s() -> float:
    """Returns the busy CPU seconds of all cores since the machine's start, including time taken by the host (steal)."""
    values = [int(value) for value in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    return (sum(values) - values[3] - values[4]) / TICKS


def wait_idle(limit_s: float, window_s: float = 1.0) -> bool:
    """Waits until the machine has been idle for `window_s` seconds.

    Returns False if that takes longer than `limit_s`.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before, started = machine_busy_s(), time.monotonic()
        time.sleep(window_s)
        if machine_busy_s() - before < IDLE_CORES * (time.monotonic() - started):
            return True
    return False


def _runs(pid: int) -> bool:
    """Returns whether a thread of the process is neither stopped nor ended."""
    states: set[str] = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            states.add(stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0])
    return not states <= _STILL


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
