"""Dynamic batches (`--max-batch-size`, `--batch-wait-timeout`): new sequences gather and join together.

A batch starts when it is full or when the wait is over, which begins with the first sequence that finds nobody waiting
before it. What has run already, a preempted sequence, waits for no batch. Beside running sequences a batch joins like
any other newcomers: as rows, blocks and budget allow. Times are the caller's: the core has no clock. Used by
`scheduler` alone.
"""

import math

from services.engine.core.sequence import Sequence, Status


class BatchGate:
    """Decides when those at the head of the queue may join. `size` None: at any time. Times in seconds."""

    def __init__(self, size: int | None, wait_s: float) -> None:
        self._size = size
        self._wait_s = wait_s
        self._gathering_since_s: float | None = None
        self._open = size is None

    def look(self, head: Sequence | None, num_waiting: int, now_s: float) -> None:
        """Takes in the queue at the beginning of a plan: whether the batch may start is the same for all of it."""
        if self._size is None:
            return
        if head is None:
            self._gathering_since_s = None
        elif self._gathering_since_s is None:
            self._gathering_since_s = now_s
        self._open = num_waiting >= self._size or self.seconds_left(now_s) <= 0

    def admits(self, head: Sequence, num_joined: int) -> bool:
        """True when the head may join a plan in which `num_joined` sequences join already."""
        if self._size is None or head.status is Status.PREEMPTED:
            return True
        return self._open and num_joined < self._size

    def started(self) -> None:
        """A new sequence joins: what stays behind gathers anew."""
        self._gathering_since_s = None

    def seconds_left(self, now_s: float) -> float:
        """Until the batch that gathers starts even if it is not full; infinite when none does."""
        if self._gathering_since_s is None:
            return math.inf
        return max(0.0, self._gathering_since_s + self._wait_s - now_s)
