"""Reads the processor time and state of threads of this process from /proc. Linux only.

Computing threads are the step thread and all threads that Python did not start: the thread pools of the C++ library
and of OpenMP. Called on the heartbeat thread.
"""

import contextlib
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from antiphon.services.engine.steps.watchdog import Activity

_TASKS = Path("/proc/self/task")
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Indices of the fields after the thread's name in its `stat` file; see proc_pid_stat(5)."""
_READY = "RD"
"""State letters that count as ready. R: the thread runs or waits for a processor. D: it waits for a disk."""


def observe(step_thread_id: int | None) -> Activity | None:
    """Returns the current activity of the computing threads; None if not on Linux or if `step_thread_id` is None."""
    if sys.platform != "linux" or step_thread_id is None:
        return None
    others = {thread.native_id for thread in threading.enumerate()} - {step_thread_id}
    return _activity(thread_id for task in _TASKS.iterdir() if (thread_id := int(task.name)) not in others)


def observe_one(thread_id: int) -> Activity | None:
    """Returns the current activity of one thread; None if not on Linux."""
    return None if sys.platform != "linux" else _activity((thread_id,))


def _activity(thread_ids: Iterable[int]) -> Activity:
    ticks: dict[int, int] = {}
    ready = False
    for thread_id in thread_ids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since iterdir()
            fields = (_TASKS / str(thread_id) / "stat").read_text().rpartition(")")[2].split()
            ticks[thread_id] = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
            ready |= fields[_STATE] in _READY
    return Activity(ticks, ready)
