"""A process that waits to become a service: `python -m antiphon.shared.actors.standby MODULES SERVICE ARGUMENT…`.

Most of the time that a service takes to start is the time to import its modules. A standby imports `MODULES` (names
separated by commas) in advance and then waits for a line on its standard input. It then runs the package `SERVICE` with
the arguments, as `python -m SERVICE ARGUMENT…` would. If its standard input ends without a line, it exits.

The command line stays the same when the standby becomes the service, but the kernel's name of the process
(`/proc/PID/comm`) changes from `STANDBY` to `ACTIVE`; `stands_by` tells them apart. Started by `antiphon.supervision`.
"""

import importlib
import os
import runpy
import sys
from collections.abc import Sequence

from antiphon.shared.actors.imports import without_collections

MODULE = "antiphon.shared.actors.standby"
STANDBY, ACTIVE = "standby", "antiphon"
"""Names of the process in the kernel while it waits, and afterwards; at most 15 characters."""
_PR_SET_NAME = 15


def stands_by(words: Sequence[str], name: str) -> bool:
    """Whether a process is a standby that has not become the service yet.

    `words`: its command line; `name`: its name in the kernel, without the line end. Linux only.
    """
    return MODULE in words and name != ACTIVE


def rename(name: str) -> None:
    """Sets the kernel's name of the calling thread; of the process if it is the main thread. Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def wait_for_line() -> bool:
    """Waits for a line on standard input, which is /dev/null afterwards. Returns False if the input has ended.

    Reads from the descriptor, because buffered input would take more than the line.
    """
    came = os.read(0, 1) == b"\n"
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return came


def main() -> None:
    """Imports, waits, and becomes the service. Raises SystemExit with the service's exit code."""
    modules, service = sys.argv[1:3]
    rename(STANDBY)
    with without_collections():
        for module in modules.split(","):
            importlib.import_module(module)
    if not wait_for_line():
        sys.exit(0)
    rename(ACTIVE)
    del sys.argv[1:3]
    runpy.run_module(service, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
