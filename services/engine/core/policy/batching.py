"""Dynamic batches (`--max-batch-size`, `--batch-wait-timeout`): new sequences are gathered and admitted together.

A batch starts when it is full or when its wait is over. The wait begins when a plan first finds a waiting sequence, and
begins anew for the rest of the queue when a new sequence joins. A preempted sequence does not wait for a batch. If
sequences are running, a gathered batch is admitted like any new sequences, as far as free rows, KV blocks and the
step's token budget allow. The caller passes the times, as the core has no clock. Used only by `admission`.
"""

import math

from antiphon.services.engine.core.sequence import Sequence, Status


class BatchGate:
    """Decides when sequences at the head of the queue may join. Times in seconds."""

    def __init__(self, size: int, wait_s: float) -> None:
        self._size = size
        self._wait_s = wait_s
        self._gathering_since_s: float | None = None
        self._open = False

    def look(self, head: Sequence | None, num_waiting: int, now_s: float) -> None:
        """Decides, once at the beginning of each plan, whether the gathered batch may start.

        `head` is the first waiting sequence; None if the queue is empty.
        """
        if head is None:
            self._gathering_since_s = None
        elif self._gathering_since_s is None:
            self._gathering_since_s = now_s
        self._open = num_waiting >= self._size or self.seconds_left(now_s) <= 0

    def admits(self, head: Sequence, num_joined: int) -> bool:
        """Returns whether the head may join a plan that `num_joined` sequences have already joined."""
        if head.status is Status.PREEMPTED:
            return True
        return self._open and num_joined < self._size

    def started(self) -> None:
        """Records that a new sequence joins. The wait of the sequences that stay in the queue begins anew."""
        self._gathering_since_s = None

    def seconds_left(self, now_s: float) -> float:
        """Returns the seconds until the gathering batch starts even if it is not full; infinite if no batch gathers."""
        if self._gathering_since_s is None:
            return math.inf
        return max(0.0, self._gathering_since_s + self._wait_s - now_s)
