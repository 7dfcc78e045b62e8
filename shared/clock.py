"""Time as a dependency, so that tests can hold the clock. Wall time is for `created` fields and spans only."""

import time
from typing import Protocol


class Clock(Protocol):
    """What actors know of time."""

    def monotonic(self) -> float:
        """Seconds that never jump."""
        ...

    def time_ns(self) -> int:
        """Nanoseconds since the attempt, for humans and traces."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """See Clock."""
        return time.monotonic()

    def time_ns(self) -> int:
        """See Clock."""
        return time.time_ns()
