"""How long the grammars of a step's sequences take, and whose masks are computed first. Pure; `mask_turns` measures.

The masks of a step share a time. Half of it goes to the sequences with the fastest grammars, so that slow grammars of
others do not delay them; the rest to those that have waited longest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from antiphon.shared import limits

FIRST_ESTIMATE_S = 0.001
"""The estimate before the first measurement: slower than common grammars, so that they precede new ones."""
LATEST_SHARE = 0.25
"""Weight of the latest measurement in the estimate."""
SHORT_S = 0.0002
"""Up to this duration a part of the work is measured by the monotonic clock, which takes a tenth of the time of reading
the thread's processor time."""


class Stopwatch:
    """Measures the processor time of a thread from the construction on.

    `clock` is the thread's processor time, `now` the monotonic time, in seconds.
    """

    def __init__(self, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._clock, self._now = clock, now
        self._clock_s, self._now_s = clock(), now()
        self._short_s = 0.0
        """Duration of the parts since `_clock_s`."""
        self.total_s = 0.0
        """The time at the last call of `read`."""

    def read(self) -> float:
        """Returns the time so far."""
        now_s = self._now()
        took_s = now_s - self._now_s
        if took_s <= SHORT_S:
            self._short_s += took_s
        else:
            clock_s = self._clock()
            took_s = max(0.0, clock_s - self._clock_s - self._short_s)
            self._clock_s, self._short_s = clock_s, 0.0
        self._now_s = now_s
        self.total_s += took_s
        return self.total_s


@dataclass(slots=True)
class MaskAccount:
    """The processor time that the grammar of one sequence takes."""

    estimate_s: float = FIRST_ESTIMATE_S
    """Expected time for the next step."""
    excess_s: float = 0.0
    """Time beyond `MASK_COST_S` a token, less the time that faster tokens have left."""
    num_waited: int = 0
    """Number of steps for which the sequence has waited since its last token."""

    def spend(self, seconds: float, num_tokens: int) -> None:
        """Records the time that a step's part for `num_tokens` tokens took."""
        self.estimate_s += (seconds - self.estimate_s) * LATEST_SHARE
        excess_s = min(seconds - num_tokens * limits.MASK_COST_S, limits.MASK_EXCESS_S / 4)
        self.excess_s = max(0.0, self.excess_s + excess_s)

    def waited(self, waits: bool) -> None:
        """Records the end of a step, in which the sequence got its mask or waited."""
        self.num_waited = self.num_waited + 1 if waits else 0

    @property
    def is_exceeded(self) -> bool:
        """Whether the grammar is too slow, so that the sequence must end."""
        return self.excess_s >= limits.MASK_EXCESS_S


def in_turn(accounts: Sequence[MaskAccount], time_s: float) -> list[int]:
    """Returns the indices of the accounts in the order in which their masks are computed in a step."""
    if sum(account.estimate_s for account in accounts) <= time_s / 2:
        return list(range(len(accounts)))
    by_cost = sorted(range(len(accounts)), key=lambda one: accounts[one].estimate_s)
    ends_s = accumulate(accounts[one].estimate_s for one in by_cost)
    num_fast = sum(end_s <= time_s / 2 for end_s in ends_s)
    return by_cost[:num_fast] + sorted(sorted(by_cost[num_fast:]), key=lambda one: -accounts[one].num_waited)
