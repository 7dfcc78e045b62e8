"""Passes step reports in order, and not too many, from the step thread to the event loop. Called by the service.

Step N is published on the event loop while the step thread computes step N + 1. With `wait` the step thread blocks
until the report is published. The watchdog looks at the oldest report, because streams stand still while it waits.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from antiphon.services.engine.steps.loop import StepReport
from antiphon.services.engine.steps.watchdog import WaitingReport
from antiphon.shared import limits


class ReportQueue:
    """The queue. To be created on the event loop; `put` is called on the step thread, the rest on the event loop.

    `publish` is called on the event loop.
    """

    def __init__(self, publish: Callable[[StepReport], None], *, wait: bool) -> None:
        self._event_loop = asyncio.get_running_loop()
        self.thread_id = threading.get_native_id()
        """The system's id of the event loop's thread."""
        self._waiting: deque[WaitingReport] = deque()
        self._publish = publish
        self._wait = wait
        self._failed: asyncio.Future[None] = self._event_loop.create_future()
        self._room = threading.Semaphore(1 if wait else limits.STEP_REPORTS_MAX)

    def put(self, report: StepReport) -> None:
        """Adds a report. Blocks while `STEP_REPORTS_MAX` reports wait; with `wait`, until it is published."""
        self._room.acquire()
        self._waiting.append(WaitingReport(report.step))
        # The event loop calls these in order, so a queue of our own would only cost a further iteration.
        self._event_loop.call_soon_threadsafe(self._take, report)
        if self._wait:
            # With `wait` the semaphore has one place, which `_take` releases after it has published the report.
            self._room.acquire()
            self._room.release()

    def _take(self, report: StepReport) -> None:
        try:
            if not self._failed.done():
                self._publish(report)
        except Exception as error:
            self._failed.set_exception(error)
        finally:
            self._waiting.popleft()
            self._room.release()

    def oldest(self) -> WaitingReport | None:
        """Returns the report that has waited longest; None if none waits. May be called on any thread."""
        try:
            return self._waiting[0]
        except IndexError:
            return None

    async def run(self) -> None:
        """Waits without end. Raises what `publish` has raised; nothing is published after that."""
        await asyncio.shield(self._failed)

    async def empty(self) -> None:
        """Waits until every report that was put before the call is published."""
        await asyncio.sleep(0)  # the rest of this task comes behind the callbacks of `put`
