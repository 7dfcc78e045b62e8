"""Background tasks: keeps references to the tasks until they end, and reports their failures.

For tasks whose results are not awaited. If a failure must end the caller, use a task group or an actor instead.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """The tasks of one owner. `failed`: message for the event loop's exception handler if a task fails."""

    def __init__(self, failed: str) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts the work on the running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            told = {"message": self._failed, "exception": error, "task": task}
            task.get_loop().call_exception_handler(told)
