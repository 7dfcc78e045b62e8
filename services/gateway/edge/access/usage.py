"""Delivers usage records to the bus and to the sink that `--usage-sink` names. Never delays a request.

Each receiver has a bounded queue and a task that delivers from it, in batches, with retries. If a receiver is down for
so long that its queue is full, further records are dropped and counted.

Where the bus keeps usage records, a guest offers a `UsageBook`: the gateway gives its records to it alone, and the book
feeds the sink from what the bus has.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from antiphon.shared import limits
from antiphon.shared.messages import UsageRecord

log = logging.getLogger(__name__)
Deliver = Callable[[Sequence[UsageRecord]], Awaitable[None]]
"""Delivers records in order. Raises DeliveryError if it could deliver none or only some of them."""
RETRY_S = (0.5, 60.0)
"""First and longest pause after a failed delivery, seconds; it doubles with each failure."""


class DeliveryError(Exception):
    """The receiver did not accept the records. The delivery is repeated."""


class Receiver:
    """One receiver's queue and the task that empties it. The task runs from the first record on."""

    def __init__(self, name: str, deliver: Deliver) -> None:
        self.name = name
        self.num_delivered = 0
        self.num_dropped = 0
        self._deliver = deliver
        self._waiting: deque[UsageRecord] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

    @property
    def is_empty(self) -> bool:
        """Whether no record waits."""
        return not self._waiting

    def put(self, record: UsageRecord) -> None:
        """Queues a record, or drops it if the queue is full."""
        if len(self._waiting) >= limits.USAGE_QUEUE_MAX:
            self.num_dropped += 1
            return
        self._waiting.append(record)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._empty())

    async def close(self, timeout_s: float) -> None:
        """Waits until the queue is empty, at most `timeout_s`; then drops the remaining records."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)
        if self._task is not None:
            self._task.cancel()
        if self._waiting:
            self.num_dropped += len(self._waiting)
            log.error("%d usage records could not be delivered to %s", len(self._waiting), self.name)
            self._waiting.clear()

    async def _empty(self) -> None:
        pause_s = RETRY_S[0]
        try:
            while self._waiting:
                batch = [self._waiting[index] for index in range(min(len(self._waiting), limits.USAGE_BATCH_MAX))]
                try:
                    await self._deliver(batch)
                except DeliveryError as error:
                    self._failed(error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(RETRY_S[1], 2 * pause_s)
                    continue
                for _ in batch:
                    self._waiting.popleft()
                self.num_delivered += len(batch)
                pause_s, self._is_failing = RETRY_S[0], False
        finally:
            self._task = None

    def _failed(self, error: DeliveryError) -> None:
        if not self._is_failing:
            log.warning("%s takes no usage records, which wait: %s", self.name, error)
        self._is_failing = True


@dataclass(slots=True)
class ReceiverCount:
    """Records that a receiver took, and those that were dropped because it was down too long."""

    num_delivered: int = 0
    num_dropped: int = 0


class UsageBook:
    """Records on the bus that a request runs, and its usage once, whichever gateway ends it. Offered by a guest."""

    otherwise: Callable[[UsageRecord], None]
    """Where records go if the bus turns out to keep none. Set before the first request."""

    def opened(self, started: UsageRecord) -> None:
        """Notes that a request starts. Does not wait. `started`: its record so far; `outcome` has no meaning."""
        raise NotImplementedError

    def record(self, record: UsageRecord) -> None:
        """Takes the record of a request that has ended. Does not wait."""
        raise NotImplementedError

    def left(self, record: UsageRecord) -> None:
        """Notes that another gateway may continue a request, or another run of this one. Does not wait.

        `record`: what is recorded if nobody does.
        """
        raise NotImplementedError

    async def flush(self) -> None:
        """Delivers the queued records, at the end of the process."""
        raise NotImplementedError

    def counts(self) -> dict[str, ReceiverCount]:
        """Returns the counts by receiver."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class UsageLedger:
    """Receives the usage record of each request of a gateway. Without `book` and receivers the records are dropped."""

    gateway_id: str = ""
    receivers: Sequence[Receiver] = ()
    book: UsageBook | None = None

    def __post_init__(self) -> None:
        if self.book is not None:
            self.book.otherwise = self._directly

    def opened(self, started: UsageRecord) -> None:
        """Notes that a request starts. See UsageBook."""
        if self.book is not None:
            self.book.opened(started)

    def record(self, record: UsageRecord) -> None:
        """Passes a record to every receiver. To be called once for each request. Does not wait."""
        if self.book is not None:
            self.book.record(record)
        else:
            self._directly(record)

    def left(self, record: UsageRecord) -> None:
        """As `record`, for a request that another run may continue."""
        if self.book is not None:
            self.book.left(record)
        else:
            self._directly(record)

    async def close(self) -> None:
        """Delivers the queued records, at the end of the process."""
        if self.book is not None:
            await self.book.flush()
        await asyncio.gather(*(receiver.close(limits.USAGE_FLUSH_S) for receiver in self.receivers))

    def counts(self) -> dict[str, ReceiverCount]:
        """Returns the counts by the name of the receiver."""
        found = self.book.counts() if self.book is not None else {}
        for receiver in self.receivers:
            count = found.setdefault(receiver.name, ReceiverCount())
            count.num_delivered += receiver.num_delivered
            count.num_dropped += receiver.num_dropped
        return found

    def _directly(self, record: UsageRecord) -> None:
        for receiver in self.receivers:
            receiver.put(record)
