"""Applies the watchdogs to an engine: logs stalls and ends the process if a stall lasts too long.

Called by the service.
"""

import faulthandler
import logging
import sys
from collections.abc import Callable

from antiphon.services.engine.steps.computing_threads import observe, observe_one
from antiphon.services.engine.steps.in_flight import InFlightSteps
from antiphon.services.engine.steps.reports import ReportQueue
from antiphon.services.engine.steps.watchdog import DeliveryWatchdog, ProgressWatchdog, Stall
from antiphon.shared import limits
from antiphon.shared.actors.service import EXIT_FAULT, end_process
from antiphon.shared.clock import Clock

logger = logging.getLogger(__name__)


class ProgressMonitor:
    """Watches the steps of an engine and the queue of its reports.

    `check` is called on the heartbeat thread; `end` ends the process with an exit code.
    """

    def __init__(
        self,
        steps: InFlightSteps,
        reports: ReportQueue,
        clock: Clock,
        *,
        on_host: bool,
        end: Callable[[int], object] = end_process,
    ) -> None:
        self._steps = steps
        self._reports = reports
        self._clock = clock
        self._end = end
        self._of_steps, self._of_event_loop = ProgressWatchdog(on_host=on_host), DeliveryWatchdog()
        self._stalled = False

    def check(self) -> bool:
        """Returns whether the engine stands still. Ends the process if it has done so for `limits.STALL_EXIT_S`."""
        stall = self._judge()
        if stall is not None and not self._stalled:
            logger.error("computing stands still: %s", stall.reason)
        elif stall is None and self._stalled:
            logger.warning("computing goes on")
        self._stalled = stall is not None
        if stall is not None and stall.lasted_s >= limits.STALL_EXIT_S:
            self._give_up(stall)
        return self._stalled

    def _judge(self) -> Stall | None:
        steps, reports, now_s = self._steps, self._reports, self._clock.monotonic()
        step = self._of_steps.judge(now_s, steps.running, steps.planning_from_s, lambda: observe(steps.thread_id))
        delivery = self._of_event_loop.judge(now_s, reports.oldest(), lambda: observe_one(reports.thread_id))
        return step or delivery

    def _give_up(self, stall: Stall) -> None:
        logger.critical("the engine ends: %s. The stacks of its threads follow", stall.reason)
        for handler in logging.getLogger().handlers:
            handler.flush()  # the line before the stacks
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        self._end(EXIT_FAULT)
