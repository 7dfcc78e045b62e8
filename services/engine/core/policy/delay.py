"""Delays the admission of waiting sequences while others run (`--scheduler-delay-factor`).

A prompt that joins makes one step longer for all sequences. With a factor f, sequences join only when the queue has
waited f times the duration of the last step in which a sequence joined; all sequences that wait by then join together.
The caller passes the times, as the core has no clock. Used only by `admission`.
"""


class AdmissionDelay:
    """The delay between two admissions. Times are seconds from any fixed point."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_latency_s = 0.0
        self._waiting_since_s: float | None = None
        self._started_s: dict[int, float] = {}
        """Maps the number of each step in flight in which sequences join to the time at which it was planned."""

    def passed(self, now_s: float) -> bool:
        """Returns whether the head of the queue may join beside running sequences. Call only while a sequence waits."""
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        return now_s - self._waiting_since_s >= self._factor * self._last_latency_s

    def joined(self, step: int, now_s: float) -> None:
        """Records that a step in which sequences join was planned."""
        self._started_s[step] = now_s
        self._waiting_since_s = None

    def step_ended(self, step: int, now_s: float) -> None:
        """Records that a step's result has arrived. Steps in which no sequence joined are ignored."""
        started_s = self._started_s.pop(step, None)
        if started_s is not None:
            self._last_latency_s = now_s - started_s
