"""Reads what this process's computing threads do, from /proc: those of the backend and the step thread. Linux only.

The backend's are all that Python did not start: the C++ library's pool, OpenMP's. Called on the heartbeats' thread.
"""

import contextlib
import sys
import threading
from pathlib import Path

from services.engine.watchdog import Activity

_TASKS = Path("/proc/self/task")
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Places in a thread's `stat` behind its name; see proc_pid_stat(5)."""
_READY = "RD"
"""States of a thread that runs or waits for a processor, and of one that waits for a disk."""


def observe(step_thread_id: int | None) -> Activity | None:
    """The present activity; None where the system or the caller cannot say."""
    if sys.platform != "linux" or step_thread_id is None:
        return None
    others = {thread.native_id for thread in threading.enumerate()} - {step_thread_id}
    ticks: dict[int, int] = {}
    ready = False
    for task in _TASKS.iterdir():
        if (thread_id := int(task.name)) in others:
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            ticks[thread_id] = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
            ready |= fields[_STATE] in _READY
    return Activity(ticks, ready)
