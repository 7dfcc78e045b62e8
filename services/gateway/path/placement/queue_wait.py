"""Estimates how long new sequences would wait for an engine, to refuse those for which that is too long. Pure.

The rate of ended sequences shows the capacity of the engines only while sequences wait; with an empty queue it shows
the load. The estimate is therefore the length of the queue divided by the rate since the queue was last empty. There is
no estimate until sequences have waited for a while without a break; until then the queue may have UNKNOWN_ROUNDS
sequences for each batch slot.

`Retry-After` of refused clients comes from the rate of ended sequences alone (`ServiceRate`).
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from antiphon.services.gateway.path.placement.placement_queue import PlacementQueue
from antiphon.services.gateway.path.router import Router, model_of
from antiphon.shared.messages import EngineStatus, Heartbeat

KNOWN_S = 1.0
"""Time for which sequences must have waited without a break before there is an estimate."""
ENDS_MIN = 8
"""Minimum number of sequences that must have ended in this time."""
UNKNOWN_ROUNDS = 4
WINDOW_S = 120.0
"""Time over which the rate is averaged. Long, because long answers that began together also end together."""
RATE_WINDOW_S = 10.0
"""Time over which a `ServiceRate` is averaged: an end counts for 1/e after this time."""
WAIT_S = (1.0, 60.0)
"""Minimum and maximum of `Retry-After`, seconds."""
RATE_KNOWN_S = 600.0
"""Time after the last end for which the rate is valid. Later, and before the first end, `Retry-After` is its
minimum."""


class QueueWait:
    """The estimate for one model. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._ends = self._decayed_at = 0.0
        self._num_ends = 0

    def look(self, num_waiting: int, now: float) -> None:
        """Records the length of the queue after sequences were queued or placed."""
        if not num_waiting:
            self._since = None
        elif self._since is None:
            self._since = self._decayed_at = now
            self._ends, self._num_ends = 0.0, 0

    def ended(self, now: float) -> None:
        """Records that a sequence has ended."""
        self._decay(now)
        self._ends += 1.0
        self._num_ends += 1

    def is_too_long(self, num_waiting: int, num_slots: int, most_s: float, now: float) -> bool:
        """Whether a sequence after `num_waiting` others would wait longer than `most_s`.

        `num_slots`: batch slots of all engines of the model.
        """
        estimate_s = self.estimate_s(num_waiting, now)
        return num_waiting >= UNKNOWN_ROUNDS * num_slots if estimate_s is None else estimate_s > most_s

    def estimate_s(self, num_waiting: int, now: float) -> float | None:
        """Returns the expected wait of a sequence after `num_waiting` others, seconds; None if it is unknown."""
        if self._since is None or now - self._since < KNOWN_S or self._num_ends < ENDS_MIN:
            return None
        self._decay(now)
        seen_s = WINDOW_S * -math.expm1(-(now - self._since) / WINDOW_S)
        return num_waiting * seen_s / self._ends

    def _decay(self, now: float) -> None:
        self._ends *= math.exp(-(now - self._decayed_at) / WINDOW_S)
        self._decayed_at = now


class ServiceRate:
    """The rate of one gateway. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._ends = 0.0
        """Number of ended sequences, weighted by age."""
        self._first: float | None = None
        self._last = self._decayed_at = 0.0

    def ended(self, now: float) -> None:
        """Records that a sequence has ended."""
        self._decay(now)
        self._ends += 1.0
        self._last = now
        if self._first is None:
            self._first = now

    def per_second(self, now: float) -> float:
        """Returns the rate; 0 before the first sequence has ended."""
        if self._first is None:
            return 0.0
        self._decay(now)
        # Shortly after the first end the window is not full yet.
        seen_s = RATE_WINDOW_S * -math.expm1(-max(now - self._first, 1.0) / RATE_WINDOW_S)
        return self._ends / seen_s

    def wait_s(self, num_waiting: int, now: float) -> float:
        """Returns the time until `num_waiting` sequences and one more have ended, within WAIT_S."""
        least, most = WAIT_S
        if self._first is None or now - self._last > RATE_KNOWN_S:
            return least
        return min(most, max(least, (num_waiting + 1) / self.per_second(now)))

    def _decay(self, now: float) -> None:
        self._ends *= math.exp(-(now - self._decayed_at) / RATE_WINDOW_S)
        self._decayed_at = now


class QueueWaits:
    """The estimates of one gateway. `engines` returns the engines that get work; `now` is its clock, seconds."""

    def __init__(
        self,
        queue: PlacementQueue[Any],
        router: Router,
        engines: Callable[[float], Sequence[Heartbeat]],
        now: Callable[[], float],
    ) -> None:
        self._queue, self._router, self._engines, self._now = queue, router, engines, now
        self._rate = ServiceRate()
        self._waits: dict[str, QueueWait] = {}
        self.expected: Counter[str] = Counter()
        """By model: number of sequences (without the idle lane) of accepted requests whose prompts are being prepared.
        Requests count their own."""
        self.have_waited = False
        """Whether sequences waited when the queues were looked at last."""

    def look(self) -> None:
        """Records the lengths of the queues."""
        now, self.have_waited = self._now(), len(self._queue) > 0
        for model in {*self._queue.models(), *self._waits}:
            self._waits.setdefault(model, QueueWait()).look(self._queue.num_waiting(model), now)

    def ended(self, model: str, *, idle: bool) -> None:
        """Records that a placed sequence has ended. `idle`: it was one of the idle lane."""
        now = self._now()
        self._rate.ended(now)
        if not idle and (wait := self._waits.get(model)) is not None:
            wait.ended(now)

    def retry_after_s(self) -> float:
        """Returns the time until the present queues will have been served, at the present rate of ended sequences.

        These queues are the queue here, the sequences in preparation, and this gateway's waiting sequences at the
        engines.
        """
        now = self._now()
        here = self._queue.num_ordinary + self.expected.total()
        return self._rate.wait_s(here + self._router.num_queued(self._engines(now)), now)

    def waits_longer(self, model: str, most_s: float) -> bool:
        """Whether a new sequence of a model would wait longer for an engine than `most_s` seconds."""
        now, wait = self._now(), self._waits.get(model) or QueueWait()
        engines = [beat for beat in self._engines(now) if model_of(beat) == model]
        slots = sum(beat.status.max_num_seqs for beat in engines if isinstance(beat.status, EngineStatus))
        num_waiting = self._queue.num_waiting(model) + self.expected[model] + self._router.num_queued(engines)
        return slots > 0 and wait.is_too_long(num_waiting, slots, most_s, now)
