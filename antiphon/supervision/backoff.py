"""Decides how long to wait before a crashed process is restarted, and when to give up. Used by `fleet`."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Counts the crashes of one process.

    The wait is `first_s` seconds after one crash within the last `window_s` seconds and doubles with each further crash
    in this window, up to `max_s`. After more than `crashes_max` crashes in the window the process is given up.
    """

    first_s: float = 0.1
    max_s: float = 5.0
    crashes_max: int = 5
    window_s: float = 60.0
    _crashes: deque[float] = field(default_factory=deque[float], repr=False)

    def crashed(self, now: float) -> float | None:
        """Records a crash at `now` (monotonic seconds). Returns the seconds to wait, or None to give up."""
        while self._crashes and self._crashes[0] <= now - self.window_s:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > self.crashes_max:
            return None
        return min(self.max_s, self.first_s * 2.0 ** (len(self._crashes) - 1))
