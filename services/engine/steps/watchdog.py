"""Detects a step or an event loop that hangs while the other threads of the process still run. No I/O and no clock.

Called before each heartbeat, on the heartbeat thread (`progress`), with the running step that the step thread publishes
(`in_flight`) and the results that wait for the event loop (`reports`). A step counts as hanging for one of two reasons:

- The step has run far longer than expected from earlier steps of its size. The limit grows with the attention work,
  because the context may be longer than in those steps.
- If the host's processors compute the step: no computing thread has used processor time or was ready to run for
  `limits.STEP_IDLE_S`. This rule needs no expected duration, so it also covers first steps. It never applies to a long
  step that computes.

The event loop counts as hanging if results of a step wait for it (`WaitingReport`) and its thread has not used
processor time and was not ready to run for `limits.STEP_IDLE_S`.

If the time between two calls is longer than `PAUSE_S`, the whole process was suspended, and that time is not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.services.engine.steps.in_flight import RunningStep
from antiphon.services.engine.steps.step_time import attention_work
from antiphon.shared import limits

PAUSE_S = 4 * limits.HEARTBEAT_INTERVAL_S
"""Longest time between two calls of `judge`, in seconds. After a longer one the process counts as suspended."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A snapshot of the computing threads."""

    ticks: dict[int, int]
    """Processor time in clock ticks, by thread id."""
    ready: bool
    """Whether any of the threads runs now or waits for a processor or a disk."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A hanging step: the reason, and for how many seconds a step has been found to hang."""

    reason: str
    lasted_s: float


@dataclass(frozen=True, slots=True, eq=False)
class WaitingReport:
    """Results of a step that wait for the event loop, which is to send them."""

    step: int


class _Watchdog:
    """Follows one thing after the other, and the threads that should work on it."""

    def __init__(self) -> None:
        self._judged_at: float | None = None
        self._counts_from = 0.0
        """Time before this point is not counted, because the process was suspended."""
        self._watched: object | None = None
        self._activity: Activity | None = None
        self._active_at = 0.0
        self._stalled_at: float | None = None

    def _follow(self, now_s: float, watched: object | None, observe: Callable[[], Activity | None] | None) -> None:
        """`observe` is called only if the same thing was watched at the last call; None: threads are not looked at."""
        if self._judged_at is not None and now_s - self._judged_at > PAUSE_S:
            self._counts_from = now_s
            self._stalled_at = None if self._stalled_at is None else now_s
        self._judged_at = now_s
        if watched is None or watched is not self._watched:
            self._watched, self._activity, self._active_at = watched, None, now_s
        elif observe is not None:
            self._look_at_threads(now_s, observe())

    def _look_at_threads(self, now_s: float, activity: Activity | None) -> None:
        unknown = activity is None or activity.ready
        if unknown or (self._activity is not None and activity != self._activity):
            self._active_at = now_s
        self._activity = activity

    def _idle_s(self, now_s: float, asleep_until_s: float = 0.0) -> float:
        """Returns for how long no thread has worked although it should; 0 if not for `limits.STEP_IDLE_S`."""
        idle_s = now_s - max(self._active_at, self._counts_from, asleep_until_s)
        return 0.0 if self._watched is None or idle_s < limits.STEP_IDLE_S else idle_s

    def _stall(self, now_s: float, reason: str | None) -> Stall | None:
        if reason is None:
            self._stalled_at = None
            return None
        self._stalled_at = now_s if self._stalled_at is None else self._stalled_at
        return Stall(reason, now_s - self._stalled_at)


class ProgressWatchdog(_Watchdog):
    """Watches the steps of one engine. `on_host`: see `EngineFacts.computes_on_host`."""

    def __init__(self, *, on_host: bool) -> None:
        super().__init__()
        self._on_host = on_host

    def judge(
        self, now_s: float, step: RunningStep | None, asleep_until_s: float, observe: Callable[[], Activity | None]
    ) -> Stall | None:
        """Returns a Stall if the running step hangs, else None. Times are monotonic seconds.

        The step thread sleeps on purpose until `asleep_until_s`. `observe` returns a snapshot of the computing threads,
        or None if that is not possible; it is called only if the same step was running at the last call, and only when
        this process computes the steps.
        """
        self._follow(now_s, step, observe if self._on_host else None)
        reason = None if step is None else self._too_long(now_s, step) or self._idle(now_s, step, asleep_until_s)
        return self._stall(now_s, reason)

    def _too_long(self, now_s: float, step: RunningStep) -> str | None:
        age_s = now_s - max(step.started_s, self._counts_from)
        limit_s = self._limit_s(step) if age_s > limits.STEP_STALL_S else age_s
        if age_s <= limit_s:
            return None
        return f"step {step.step} has run for {age_s:.1f} s, where {step.expected_s:.3g} s were expected"

    def _limit_s(self, step: RunningStep) -> float:
        if step.basis is None:
            return float("inf") if self._on_host else limits.DEVICE_FIRST_STEP_S
        # A step's time grows at most linearly with its tokens and its attention work. `expected_s` covers the tokens.
        growth = attention_work(step.scheduled) / max(1, attention_work(step.basis.scheduled))
        least_s = limits.STEP_STALL_S if self._on_host else limits.DEVICE_STEP_STALL_S
        return max(least_s, limits.STEP_STALL_FACTOR * step.expected_s * max(1.0, growth))

    def _idle(self, now_s: float, step: RunningStep, asleep_until_s: float) -> str | None:
        idle_s = self._idle_s(now_s, asleep_until_s) if self._on_host else 0.0
        return f"step {step.step} has not used a processor for {idle_s:.1f} s" if idle_s else None


class DeliveryWatchdog(_Watchdog):
    """Watches the event loop of one engine."""

    def judge(
        self, now_s: float, waiting: WaitingReport | None, observe: Callable[[], Activity | None]
    ) -> Stall | None:
        """Returns a Stall if the event loop hangs while results wait for it, else None.

        `observe` returns a snapshot of the event loop's thread. It is called only if the same results waited at the
        last call.
        """
        self._follow(now_s, waiting, observe)
        idle_s = self._idle_s(now_s)
        if waiting is None or not idle_s:
            return self._stall(now_s, None)
        reason = f"the results of step {waiting.step} wait for the event loop, which has not run for {idle_s:.1f} s"
        return self._stall(now_s, reason)
