"""How long to wait before a crashed process is started again, and when to give up. Pure; used by `antiphon.fleet`."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Counts the crashes of one process.

    The wait starts at `first_s` and doubles with every crash of the last `window_s` seconds, up to `max_s`. More than
    `crashes_max` crashes within the window mean that starting again does not help.
    """

    first_s: float = 0.1
    max_s: float = 5.0
    crashes_max: int = 5
    window_s: float = 60.0
    _crashes: deque[float] = field(default_factory=deque[float], repr=False)

    def crashed(self, now: float) -> float | None:
        """Notes a crash at `now` (monotonic seconds). Returns the seconds to wait, or None: give up."""
        while self._crashes and self._crashes[0] <= now - self.window_s:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > self.crashes_max:
            return None
        return min(self.max_s, self.first_s * 2.0 ** (len(self._crashes) - 1))
