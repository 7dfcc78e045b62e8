"""Runs a command that must not outlive its parent: `python -I -S child.py PARENT_PID COMMAND ARGUMENT…`.

The kernel is asked to kill this process when its parent ends, however the parent ends, and not to put another process
aside at once when this one wakes up: all share a machine's cores, and what waits for a computing thread that was put
aside is the whole step. Computing threads take that back for themselves. Then the command takes the process over. A
small program of its own because code between fork and exec is unsafe in a process with threads.
Imports little on purpose: it runs before every child.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Asks for SIGKILL at the parent's end; leaves at once when the parent has ended already."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        os._exit(1)


def wait_for_a_turn() -> None:
    """Waking up does not take a core from anybody from now on; the share of the cores stays the same.

    A sandbox may refuse it: then this is a little slower and nothing else.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    """Never returns."""
    die_with_parent(int(sys.argv[1]))
    wait_for_a_turn()
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")


if __name__ == "__main__":
    main()
