"""A bounded queue that passes step reports in order from the step thread to the event loop. Called by the service.

Step N is published on the event loop while the step thread computes step N + 1. With `wait` the step thread blocks
until the report is published.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable

from services.engine.steps.loop import StepReport
from shared import limits


class ReportQueue:
    """The queue. To be created on the event loop; `put` is called on the step thread, the rest on the event loop."""

    def __init__(self, publish: Callable[[StepReport], Awaitable[None]], *, wait: bool) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._publish = publish
        self._wait = wait
        self._reports: asyncio.Queue[StepReport] = asyncio.Queue()
        self._room = threading.Semaphore(1 if wait else limits.STEP_REPORTS_MAX)

    def put(self, report: StepReport) -> None:
        """Adds a report. Blocks while `STEP_REPORTS_MAX` reports wait; with `wait`, until it is published."""
        self._room.acquire()
        self._event_loop.call_soon_threadsafe(self._reports.put_nowait, report)
        if self._wait:
            # With `wait` the semaphore has one place, which `run` releases after it has published the report.
            self._room.acquire()
            self._room.release()

    async def run(self) -> None:
        """Publishes reports without end, one after the other, so that the events of a sequence stay in order."""
        while True:
            report = await self._reports.get()
            await self._publish(report)
            self._room.release()
            self._reports.task_done()

    async def empty(self) -> None:
        """Waits until every report in the queue is published."""
        await self._reports.join()
