"""Feeds a sink from the log: every record once, in order, from one gateway at a time.

The position of the sink is in the log, with the gateway that feeds it. A gateway that finds no living one there becomes
it. After each batch that the sink has taken it writes the position; if another gateway has written meanwhile, it stops.
So a sink gets a record twice only if its feeder ended, or stood still for long, between the two.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Set

from antiphon.services.gateway.edge.access.usage import RETRY_S, Deliver, DeliveryError
from antiphon.services.gateway.guests.usage.log import SinkPosition, UsageLog
from antiphon.services.gateway.guests.usage.orphans import Owner
from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogUnavailableError
from antiphon.shared.clock import Clock
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)
_RENEW_S = 60.0
"""Interval in which the position is written although it has not changed, seconds: a full log drops its oldest messages,
and would drop the position of a sink that takes nothing before the records that wait for it."""


def sink_name(word: str) -> str:
    """Returns the name of a sink in the log. `word`: what is the same for all gateways that have this sink."""
    return hashlib.sha256(word.encode()).hexdigest()[:16]


class Delivery:
    """Feeds the sink of one gateway. `deliver`: see `usage.Deliver`. `heard` returns the living gateways."""

    def __init__(
        self, usage: UsageLog, name: str, deliver: Deliver, clock: Clock, heard: Callable[[], Set[Owner]]
    ) -> None:
        self.num_delivered = 0
        self._usage, self._name, self._deliver = usage, name, deliver
        self._clock, self._heard = clock, heard
        self._last, self._revision = 0, 0
        """The position, and its revision; revision 0: this gateway does not feed the sink."""
        self._written_s = 0.0
        self._silent: Owner | None = None
        """The feeder that was not heard when this gateway looked last."""
        self._news = asyncio.Event()
        self._is_failing = False

    def wake(self) -> None:
        """There are new records."""
        self._news.set()

    async def run(self) -> None:
        """Feeds the sink until it is cancelled."""
        pause_s = RETRY_S[0]
        while True:
            try:
                await self.feed()
                pause_s, self._is_failing = RETRY_S[0], False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limits.USAGE_POLL_S):
                        await self._news.wait()
                self._news.clear()
            except (DeliveryError, LogUnavailableError, ServiceError) as error:
                if not self._is_failing:
                    log.warning("the sink takes no usage records, which wait on the bus: %s", error)
                self._is_failing = True
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_S[1], 2 * pause_s)

    async def feed(self) -> None:
        """Delivers all records that wait, if this gateway feeds the sink or may begin to.

        Raises DeliveryError, LogUnavailableError.
        """
        if not self._revision and not await self._claim():
            return
        if self._clock.monotonic() - self._written_s >= _RENEW_S:
            await self._move(self._last)
        while self._revision and (batch := await self._usage.records(self._last, limits.USAGE_BATCH_MAX)):
            await self._deliver([record for _, record in batch])
            self.num_delivered += len(batch)
            await self._move(batch[-1][0])

    async def finish(self) -> None:
        """Delivers what waits, within `USAGE_FLUSH_S`, and lets another gateway feed the sink."""
        try:
            async with asyncio.timeout(limits.USAGE_FLUSH_S):
                await self.feed()
        except (TimeoutError, DeliveryError, LogUnavailableError, ServiceError) as error:
            log.warning("usage records wait on the bus for another gateway: %s", error or type(error).__name__)
        if self._revision:
            with contextlib.suppress(LogUnavailableError):  # another gateway waits until this one is not heard any more
                await self._move(self._last, ("", ""))
            self._revision = 0

    async def _claim(self) -> bool:
        """Begins to feed the sink if no living gateway does. Returns whether this one does now."""
        heard = self._heard()
        if self._usage.own not in heard:
            return False
        found, revision = await self._usage.position(self._name)
        is_free = found.owner in (("", ""), self._usage.own) or found.owner[0] == self._usage.own[0]
        if found.owner in heard and found.owner != self._usage.own:
            self._silent = None
            return False
        if not is_free and self._silent != found.owner:
            self._silent = found.owner  # it may have missed a heartbeat: this gateway looks again
            return False
        self._last, self._revision = found.last, revision
        return await self._move(found.last)

    async def _move(self, last: int, owner: Owner | None = None) -> bool:
        """Writes the position. Returns False if another gateway has, which then feeds the sink."""
        position = SinkPosition(owner or self._usage.own, last)
        revision = await self._usage.move(self._name, position, self._revision)
        self._revision, self._last, self._written_s = revision or 0, last, self._clock.monotonic()
        return revision is not None
