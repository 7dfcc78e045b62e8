"""The wall clock, and whether it can be trusted: a wrong clock must not delete what has not expired."""

import math
import time
from collections.abc import Callable

from antiphon.shared.files import limits as file_limits


class WallClock:
    """Unix time. A jump is noticed by comparison with the monotonic clock, at the next call of any method."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._offset = wall() - monotonic()
        self._steady_since = monotonic()

    def now(self) -> int:
        """Returns the time in Unix seconds."""
        wall, monotonic = self._wall(), self._monotonic()
        if abs(wall - monotonic - self._offset) > file_limits.CLOCK_JUMP_S:
            self._steady_since = monotonic
        self._offset = wall - monotonic
        return int(wall)

    def certain(self) -> float:
        """Returns a time in Unix seconds that has certainly passed: now, if the clock has run evenly for a while."""
        now = self.now()
        return now if self._monotonic() - self._steady_since >= file_limits.CLOCK_STEADY_S else -math.inf
