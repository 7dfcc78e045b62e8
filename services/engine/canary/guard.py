"""The thread that checks the weights in small portions, at a bounded share of one processor."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from antiphon.services.engine.canary.checksums import Checksums

BEAT_S = 1.0
COST_SHARE = 0.01
"""Share of one processor that the checks may take."""


class WeightGuard:
    """Checks the weights from `start` to `close`. `on_fault` is called on its thread."""

    def __init__(self, sums: Checksums, on_fault: Callable[[str], None]) -> None:
        self._sums, self._on_fault = sums, on_fault
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._asked: list[Future[str]] = []
        self._thread = threading.Thread(target=self._run, name="weight-checks", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def run_now(self) -> "Future[str]":
        """Requests an immediate check of all weights. The result is the place of a change, or empty.

        From any thread.
        """
        answer: Future[str] = Future()
        with self._lock:
            self._asked.append(answer)
        self._woken.set()
        return answer

    def close(self) -> None:
        """Ends the thread. The weights may be freed afterwards."""
        self._closing.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                asked, self._asked = self._asked, []
            fault = self._check(whole=bool(asked))
            if fault:
                # Report the fault before the answers, because the receiver of an answer may read the engine's fault
                # immediately.
                self._on_fault(f"the weights have changed in memory: {fault}")
            for answer in asked:
                answer.set_result(fault)
            if fault:
                return
            self._woken.wait(BEAT_S)
            self._woken.clear()

    def _check(self, *, whole: bool) -> str:
        """Checks as many portions as the share of time allows, at least one and at most all; with `whole`, all."""
        ends_at = time.thread_time() + BEAT_S * COST_SHARE
        for _ in range(self._sums.num_portions):
            fault = self._sums.check_next()
            if fault or self._closing.is_set():
                return fault
            if not whole and time.thread_time() >= ends_at:
                break
        return ""
