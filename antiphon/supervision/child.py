"""Runs a command that must not outlive its parent: `python -I -S child.py PARENT_PID COMMAND ARGUMENT…`.

Before it executes the command in this process, the program makes two requests to the kernel. (1) Kill this process when
its parent ends for any reason. (2) Schedule this process as SCHED_BATCH, so that its wake-ups do not preempt a thread
that computes a step: all threads of the step would have to wait for the preempted one. The engine's computing threads
leave this class themselves.

This is a program of its own because running code between fork and exec is unsafe in a process with threads. It imports
little because it runs before every child.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Makes the kernel send SIGKILL to this process when its parent ends. Exits with 1 if the parent has ended already.

    Raises OSError if the kernel refuses. Does nothing on systems other than Linux.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        os._exit(1)


def wait_for_a_turn() -> None:
    """Puts this process into the scheduling class SCHED_BATCH: its wake-ups do not preempt other processes.

    The process's share of the cores stays the same. If a sandbox refuses the change, the system only gets a little
    slower.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    """Replaces this process by the command. Does not return."""
    die_with_parent(int(sys.argv[1]))
    wait_for_a_turn()
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")


if __name__ == "__main__":
    main()
