"""What a gateway tells the log of its own requests, and the tasks that write records and feed the sink."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence, Set
from typing import Any

from antiphon.services.gateway.edge.access.usage import DeliveryError, Receiver, ReceiverCount, UsageBook
from antiphon.services.gateway.guests.usage.delivery import Delivery
from antiphon.services.gateway.guests.usage.log import UsageLog
from antiphon.services.gateway.guests.usage.orphans import Owner
from antiphon.services.gateway.guests.usage.reaper import Reaper, Recorded
from antiphon.services.gateway.path.guest import Guest
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.clock import Clock
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import UsageRecord

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Interval at which the reaper is asked whether it is time to look, seconds."""


class LoggedUsage(Guest, UsageBook):
    """The usage book of one gateway.

    `heard` returns the living gateways. `recorded`: see `RecordedRequests`. `delivery` feeds the sink, if there is one.
    """

    def __init__(
        self,
        usage: UsageLog,
        clock: Clock,
        heard: Callable[[], Set[Owner]],
        recorded: Recorded,
        delivery: Delivery | None = None,
    ) -> None:
        self._usage, self._clock, self._delivery = usage, clock, delivery
        self._receiver = Receiver("bus", self._write)
        self._running: set[str] = set()
        """Ids of the requests that run here, and of those whose records wait to be written."""
        self._reaper = Reaper(usage, clock, heard, recorded, self._running)
        self._began_s = clock.monotonic()
        self._is_there = False
        """Whether the log has answered, so that records wait for it when it is away."""

    # --- the book ---

    def opened(self, started: UsageRecord) -> None:
        """See UsageBook. Raises ServiceError if the bus cannot be reached for long."""
        self._usage.start(started)
        self._running.add(started.request_id)

    def record(self, record: UsageRecord) -> None:
        """See UsageBook."""
        num_dropped = self._receiver.num_dropped
        self._receiver.put(record)
        if self._receiver.num_dropped != num_dropped:
            self._running.discard(record.request_id)

    def left(self, record: UsageRecord) -> None:
        """See UsageBook."""
        self._running.discard(record.request_id)
        try:
            self._usage.start(record)
        except ServiceError as error:
            log.warning("the usage of the request %s is not known to others: %s", record.request_id, error)
        self._reaper.left()

    async def flush(self) -> None:
        """See UsageBook."""
        await self._receiver.close(limits.USAGE_FLUSH_S)

    def counts(self) -> dict[str, ReceiverCount]:
        """See UsageBook."""
        found = {"bus": ReceiverCount(self._receiver.num_delivered, self._receiver.num_dropped)}
        if self._delivery is not None:
            found["sink"] = ReceiverCount(self._delivery.num_delivered)
        return found

    # --- the guest ---

    def work(self) -> Iterable[Coroutine[Any, Any, None]]:
        """See Lifetime."""
        return [self._reap(), *([] if self._delivery is None else [self._delivery.run()])]

    async def finish(self) -> None:
        """See Lifetime. Feeds the sink with what was written last, and lets another gateway feed it."""
        if self._delivery is not None:
            await self._delivery.finish()

    async def _write(self, records: Sequence[UsageRecord]) -> None:
        """Writes records to the log; without a log, passes them on. See `usage.Deliver`."""
        try:
            await self._usage.end(records)
        except (LogUnavailableError, ServiceError) as error:
            if self._is_there or self._clock.monotonic() - self._began_s < limits.USAGE_LOG_WAIT_S:
                raise DeliveryError(str(error)) from error
            for record in records:
                self.otherwise(record)
        else:
            self._is_there = True
            if self._delivery is not None:
                self._delivery.wake()
        self._running.difference_update([record.request_id for record in records])

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._reaper.look()
            except (LogUnavailableError, ServiceError) as error:
                log.debug("requests without usage records wait for the bus: %s", error)
