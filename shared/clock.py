"""Time as a dependency, so that tests can control the clock. Wall time is for `created` fields and spans only."""

import time
from typing import Protocol


class Clock(Protocol):
    """The clock that actors use."""

    def monotonic(self) -> float:
        """Returns seconds of a monotonic clock; only differences between two readings have a meaning."""
        ...

    def time_ns(self) -> int:
        """Returns nanoseconds since the Unix epoch, for values shown to users and for traces."""
        ...


class SystemClock:
    """The machine's clock."""

    monotonic = staticmethod(time.monotonic)
    time_ns = staticmethod(time.time_ns)
