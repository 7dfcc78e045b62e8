"""The way of a step's report from the step thread to the event loop, in order and bounded. Called by the service.

Publishing step N runs on the event loop beside step N + 1; with `wait` the step thread stands still until it is done.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable

from services.engine.loop import StepReport
from shared import limits


class ReportQueue:
    """Made on the event loop; `put` is for the step thread, everything else for the event loop."""

    def __init__(self, publish: Callable[[StepReport], Awaitable[None]], *, wait: bool) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._publish = publish
        self._most = 1 if wait else limits.STEP_REPORTS_MAX
        self._reports: deque[StepReport] = deque()
        """Those that are not published yet, the one that is being published included."""
        self._come, self._gone = asyncio.Event(), asyncio.Event()
        self._room = threading.Event()

    def put(self, report: StepReport) -> None:
        """Hands a report over; blocks while publishing is behind, or until this one is published."""
        self._reports.append(report)
        self._event_loop.call_soon_threadsafe(self._come.set)
        while len(self._reports) >= self._most:
            self._room.clear()
            # One that went before `clear` is seen here, one that goes after it ends the wait.
            if len(self._reports) >= self._most:
                self._room.wait()

    async def run(self) -> None:
        """Publishes for ever: one report after the other, so that a sequence's events leave in order."""
        while True:
            while not self._reports:
                self._come.clear()
                await self._come.wait()
            await self._publish(self._reports[0])
            self._reports.popleft()
            self._room.set()
            self._gone.set()

    async def empty(self) -> None:
        """Returns when everything is published."""
        while self._reports:
            self._gone.clear()
            await self._gone.wait()
