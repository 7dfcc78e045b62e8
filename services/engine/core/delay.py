"""How long a waiting sequence is held back while others decode (`--scheduler-delay-factor`).

A prompt that joins makes one step long for everybody. With a factor f, the next one joins when the queue has waited
f times as long as the last step that let one join; what waits meanwhile then joins together. Times are the caller's:
the core has no clock. Used by `scheduler` alone.
"""


class AdmissionDelay:
    """The wait between two admissions. Times in seconds from any fixed point."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_latency_s = 0.0
        self._waiting_since_s: float | None = None
        self._started_s: dict[int, float] = {}
        """Steps in flight that let sequences join, and when they were planned."""

    def passed(self, now_s: float) -> bool:
        """True when the head of the queue may join beside running sequences. Called only while somebody waits."""
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        return now_s - self._waiting_since_s >= self._factor * self._last_latency_s

    def joined(self, step: int, now_s: float) -> None:
        """A step was planned that lets sequences join."""
        self._started_s[step] = now_s
        self._waiting_since_s = None

    def landed(self, step: int, now_s: float) -> None:
        """A step's result is in."""
        started_s = self._started_s.pop(step, None)
        if started_s is not None:
            self._last_latency_s = now_s - started_s
