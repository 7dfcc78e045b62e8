"""The way of a step's report from the step thread to the event loop, in order and bounded. Called by the service.

Publishing step N runs on the event loop beside step N + 1; with `wait` the step thread stands still until it is done.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable

from services.engine.loop import StepReport
from shared import limits


class ReportQueue:
    """Made on the event loop; `put` is for the step thread, everything else for the event loop."""

    def __init__(self, publish: Callable[[StepReport], Awaitable[None]], *, wait: bool) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._publish = publish
        self._wait = wait
        self._reports: asyncio.Queue[StepReport] = asyncio.Queue()
        self._room = threading.Semaphore(1 if wait else limits.STEP_REPORTS_MAX)

    def put(self, report: StepReport) -> None:
        """Hands a report over; blocks while publishing is behind, or until this one is published."""
        self._room.acquire()
        self._event_loop.call_soon_threadsafe(self._reports.put_nowait, report)
        if self._wait:
            # The only place comes back when the report is out.
            self._room.acquire()
            self._room.release()

    async def run(self) -> None:
        """Publishes for ever: one report after the other, so that a sequence's events leave in order."""
        while True:
            report = await self._reports.get()
            await self._publish(report)
            self._room.release()
            self._reports.task_done()

    async def empty(self) -> None:
        """Returns when everything is published."""
        await self._reports.join()
