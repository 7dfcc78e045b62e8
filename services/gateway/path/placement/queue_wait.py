"""Estimates how long a new sequence of one model would wait for an engine, to refuse it if that is too long. Pure.

The rate of ended sequences shows the capacity of the engines only while sequences wait; with an empty queue it shows
the load. The estimate is therefore the length of the queue divided by the rate since the queue was last empty. There is
no estimate until sequences have waited for a while without a break; until then the queue may have UNKNOWN_ROUNDS
sequences for each batch slot.
"""

import math

KNOWN_S = 1.0
"""Time for which sequences must have waited without a break before there is an estimate."""
ENDS_MIN = 8
"""Minimum number of sequences that must have ended in this time."""
UNKNOWN_ROUNDS = 4
WINDOW_S = 120.0
"""Time over which the rate is averaged. Long, because long answers that began together also end together."""


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
