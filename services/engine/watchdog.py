"""Judges whether computing has stalled: a step that hangs while the process's other threads live. Pure.

Called before each heartbeat, on the heartbeats' thread (`progress`), with what the step thread publishes (`flight`).
A step counts as hanging for one of two reasons:

- it has run far longer than steps like it took. Its context may be longer than theirs: the limit grows with that;
- on the host's processors: no computing thread has used its processor, or was ready to, for `limits.STEP_IDLE_S`. This
  needs no expectation, so it holds for first steps as well, and a long step that computes is never mistaken.

When two judgements are further apart than a lease, the whole process stood still: that time counts for nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.engine.flight import RunningStep
from services.engine.pace import attention_work
from shared import limits

PAUSE_S = limits.LEASE_S
"""Longest time between two judgements in which the process counts as having run."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What the computing threads have done."""

    ticks: dict[int, int]
    """Processor time by thread id."""
    ready: bool
    """Whether one of them runs now, or waits for a processor or a disk."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Computing stands still: why, and for how long it has been judged so, in seconds."""

    reason: str
    lasted_s: float


class ProgressWatchdog:
    """One engine's. `on_host`: see `EngineFacts.computes_on_host`."""

    def __init__(self, *, on_host: bool) -> None:
        self._on_host = on_host
        self._judged_at: float | None = None
        self._counts_from = 0.0
        """Time before this says nothing."""
        self._step: RunningStep | None = None
        self._activity: Activity | None = None
        self._active_at = 0.0
        self._stalled_at: float | None = None

    def judge(
        self, now_s: float, step: RunningStep | None, asleep_until_s: float, observe: Callable[[], Activity | None]
    ) -> Stall | None:
        """Whether the step that runs hangs. Times are monotonic seconds.

        `asleep_until_s`: the step thread sleeps on purpose until then. `observe` reads the computing threads; None
        where that is not possible. It is called only for a step that was running at the last judgement already.
        """
        self._look_at_clock(now_s)
        if step is None or step is not self._step:
            self._step, self._activity, self._active_at = step, None, now_s
        elif self._on_host:
            self._look_at_threads(now_s, observe())
        reason = None if step is None else self._too_long(now_s, step) or self._idle(now_s, step, asleep_until_s)
        if reason is None:
            self._stalled_at = None
            return None
        self._stalled_at = now_s if self._stalled_at is None else self._stalled_at
        return Stall(reason, now_s - self._stalled_at)

    def _look_at_clock(self, now_s: float) -> None:
        if self._judged_at is not None and now_s - self._judged_at > PAUSE_S:
            self._counts_from = now_s
            self._stalled_at = None if self._stalled_at is None else now_s
        self._judged_at = now_s

    def _look_at_threads(self, now_s: float, activity: Activity | None) -> None:
        unknown = activity is None or activity.ready
        if unknown or (self._activity is not None and activity != self._activity):
            self._active_at = now_s
        self._activity = activity

    def _too_long(self, now_s: float, step: RunningStep) -> str | None:
        age_s = now_s - max(step.started_s, self._counts_from)
        limit_s = self._limit_s(step) if age_s > limits.STEP_STALL_S else age_s
        if age_s <= limit_s:
            return None
        return f"step {step.step} has run for {age_s:.1f} s, where {step.expected_s:.3g} s were expected"

    def _limit_s(self, step: RunningStep) -> float:
        if step.basis is None:
            return float("inf") if self._on_host else limits.DEVICE_FIRST_STEP_S
        # The time of a step is at most linear in the tokens and in the attention work; tokens are in `expected_s`.
        growth = attention_work(step.scheduled) / max(1, attention_work(step.basis.scheduled))
        least_s = limits.STEP_STALL_S if self._on_host else limits.DEVICE_STEP_STALL_S
        return max(least_s, limits.STEP_STALL_FACTOR * step.expected_s * max(1.0, growth))

    def _idle(self, now_s: float, step: RunningStep, asleep_until_s: float) -> str | None:
        if not self._on_host:
            return None
        idle_s = now_s - max(self._active_at, self._counts_from, asleep_until_s)
        if idle_s < limits.STEP_IDLE_S:
            return None
        return f"step {step.step} has not used a processor for {idle_s:.1f} s"
