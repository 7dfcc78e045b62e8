"""An engine whose step, or event loop, hangs when the process gets SIGUSR1, run as a process by `test_stalled_engine`.

The model is the simulation's, for the answer must be known; everything else is the product's.
"""

import os
import signal
import sys
import threading
import time

from antiphon.services.engine.core.plan import StepPlan, StepResult
from antiphon.services.engine.service import EngineService
from antiphon.shared import limits
from antiphon.shared.actors.service import main
from antiphon.shared.config import EngineSettings
from tests.sim.society import HashWorker

STEP_S = 0.02
HANGS = threading.Event()
"""The next step is to hang."""


class HangingWorker(HashWorker):
    """Hangs in one step for as long as HANG_S says, without using a processor or, with SPINS, using one."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1024, max_model_len=256)
        self._busy_s = float(os.environ.get("FIRST_STEP_S", "0"))

    def run(self, plan: StepPlan) -> StepResult:
        _spin(self._busy_s)
        self._busy_s = 0.0
        if HANGS.is_set():
            HANGS.clear()
            (_spin if "SPINS" in os.environ else time.sleep)(float(os.environ["HANG_S"]))
        time.sleep(STEP_S)
        return super().run(plan)


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


if __name__ == "__main__":
    limits.STALL_EXIT_S = float(os.environ.get("STALL_EXIT_S", limits.STALL_EXIT_S))
    hang = (lambda *_: time.sleep(float(os.environ["HANG_S"]))) if "HANGS_IN_LOOP" in os.environ else HANGS.set
    signal.signal(signal.SIGUSR1, lambda *_: hang())
    build = lambda settings: EngineService(settings, lambda _: HangingWorker())  # noqa: E731 - for one call
    sys.exit(main("engine", EngineSettings, build, heartbeat_thread=True))
