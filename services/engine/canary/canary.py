"""Runs the canary among the requests and compares each result with the golden value (`measure`).

Used by the step loop.

A run is due every `interval_s`, with or without requests. On an idle engine it runs alone; otherwise it shares steps
with requests. Runs on an idle engine may take at most `COST_SHARE` of its time, so for a large model the interval is
longer.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from antiphon.services.engine.canary.measure import Golden
from antiphon.services.engine.canary.probe import difference, observed, probe_spec
from antiphon.services.engine.core.plan import EngineFacts
from antiphon.services.engine.core.request import Outcome, SequenceSpec

log = logging.getLogger(__name__)
COST_SHARE = 0.01
STRIKES = 3
"""On a backend without bit-equal results, an engine is faulty only if this many runs in a row give a different result
than the golden value.
"""
URGENT_S = 2.0
"""A run that could not join for this long is scheduled before the requests, seconds."""


class WrongResultError(RuntimeError):
    """Raised if the engine has computed a wrong result or its weights have changed. The engine must end."""


class Canary:
    """The canary of one engine. Methods are called on the step thread unless their docstrings say otherwise.

    `on_fault` is called once, from any thread, with a description of the fault.
    """

    def __init__(
        self,
        golden: Golden,
        facts: EngineFacts,
        max_model_len: int,
        interval_s: float,
        wake: Callable[[], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self.golden = golden
        self.interval_s = max(interval_s, golden.took_s / COST_SHARE)
        self.fault = ""
        """Description of the fault; empty: none. May be read from any thread."""
        self.num_runs = 0
        self._strikes = 0
        self._facts, self._max_model_len = facts, max_model_len
        self._wake, self._on_fault = wake, on_fault
        self._lock = threading.Lock()
        self._asked: list[Future[str]] = []
        """Futures of callers that have requested a run."""
        self._answers: list[Future[str]] = []
        """The futures that get the result of the present run."""
        self._outcomes: list[Outcome] = []
        self._started_s: float | None = None
        self._due_s: float | None = None

    def run_now(self) -> "Future[str]":
        """Starts a run immediately. The future's result is the fault found, or empty. From any thread."""
        answer: Future[str] = Future()
        with self._lock:
            self._asked.append(answer)
        self._wake()
        return answer

    def report(self, fault: str) -> None:
        """Marks the engine as faulty. From any thread; only the first report counts."""
        with self._lock:
            if self.fault:
                return
            self.fault = fault
            waiting = [*self._asked, *self._answers]
            self._asked, self._answers = [], []
        self._on_fault(fault)
        for answer in waiting:
            answer.set_result(fault)
        self._wake()

    def check(self) -> None:
        """Raises WrongResultError if a fault was found."""
        if self.fault:
            raise WrongResultError(self.fault)

    def seconds_left(self, now_s: float) -> float:
        """Returns the time until the next run is due; 0 if the step loop has something to do now."""
        if self.fault or self._asked:
            return 0.0
        if self._started_s is not None or self._due_s is None:
            return self.interval_s
        return max(0.0, self._due_s - now_s)

    def is_urgent(self, now_s: float) -> bool:
        """Whether the present run must be scheduled before the requests."""
        return self._started_s is not None and (now_s - self._started_s > URGENT_S or bool(self._answers))

    def next(self, now_s: float) -> SequenceSpec | None:
        """Returns the canary's sequence if a run is due; else None."""
        if self._due_s is None:
            self._due_s = now_s + self.interval_s
        if self._started_s is not None or (now_s < self._due_s and not self._asked):
            return None
        with self._lock:
            self._answers, self._asked = self._asked, []
        self.num_runs += 1
        self._started_s = now_s
        return probe_spec(self._facts, self.num_runs, self._max_model_len)

    def _judge(self, told: str, now_s: float) -> None:
        """Reports a difference. On a backend without bit-equal results, only after STRIKES runs that differ."""
        self._strikes += 1
        if self.golden.exact or self._strikes >= STRIKES:
            self.report(f"the test sequence gave {told}")
            return
        log.warning("the test sequence gave %s; it is repeated", told)
        self._due_s = now_s

    def take(self, outcomes: Sequence[Outcome], now_s: float) -> None:
        """Collects outcomes of the present run, and compares them when the run has ended."""
        self._outcomes += outcomes
        if not outcomes or outcomes[-1].finish_reason is None:
            return
        told = difference(self.golden.value, observed(self._outcomes), exact=self.golden.exact)
        self._outcomes.clear()
        self._started_s, self._due_s = None, now_s + self.interval_s
        if told:
            self._judge(told, now_s)
        else:
            self._strikes = 0
        for answer in self._answers:
            answer.set_result(self.fault)
        self._answers = []
