"""Applies the watchdog to a step loop: logs stalls and ends the process if a stall lasts too long.

Called by the service.
"""

import faulthandler
import logging
import sys
from collections.abc import Callable

from services.engine.steps.computing_threads import observe
from services.engine.steps.loop import StepLoop
from services.engine.steps.watchdog import ProgressWatchdog, Stall
from shared import limits
from shared.actors.service import EXIT_FAULT, end_process
from shared.clock import Clock

logger = logging.getLogger(__name__)


class ProgressMonitor:
    """Watches one step loop. `check` is called on the heartbeat thread; `end` ends the process with an exit code."""

    def __init__(
        self, steps: StepLoop, clock: Clock, *, on_host: bool, end: Callable[[int], object] = end_process
    ) -> None:
        self._steps = steps
        self._clock = clock
        self._end = end
        self._watchdog = ProgressWatchdog(on_host=on_host)
        self._stalled = False

    def check(self) -> bool:
        """Returns whether the running step hangs. Ends the process if a step has hung for `limits.STALL_EXIT_S`."""
        steps, now_s = self._steps.in_flight, self._clock.monotonic()
        stall = self._watchdog.judge(
            now_s, steps.running, steps.planning_from_s, lambda: observe(self._steps.thread_id)
        )
        if stall is not None and not self._stalled:
            logger.error("computing stands still: %s", stall.reason)
        elif stall is None and self._stalled:
            logger.warning("computing goes on")
        self._stalled = stall is not None
        if stall is not None and stall.lasted_s >= limits.STALL_EXIT_S:
            self._give_up(stall)
        return self._stalled

    def _give_up(self, stall: Stall) -> None:
        logger.critical("the engine ends: %s. The stacks of its threads follow", stall.reason)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        self._end(EXIT_FAULT)
