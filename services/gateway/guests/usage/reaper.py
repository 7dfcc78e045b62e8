"""Writes the usage records of requests that nobody runs any more. Each gateway does; the first one to write counts.

It looks at its start, when a gateway has gone, while there are orphans, and now and then. Without heartbeats of its own
it does not look: then the others are not heard either.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Set

from antiphon.services.gateway.guests.offers import RecordedOutput
from antiphon.services.gateway.guests.usage.log import OpenRequest, UsageLog
from antiphon.services.gateway.guests.usage.orphans import Orphans, Owner, can_go_on, lost
from antiphon.shared import limits
from antiphon.shared.clock import Clock

log = logging.getLogger(__name__)
_AGAIN_S = 60.0
"""Pause before a request that its client may resume is looked at again, seconds: the client may have done so."""
Recorded = Callable[[str], Awaitable[RecordedOutput | None]]


class Reaper:
    """The reaper of one gateway. `heard` returns the living gateways. `recorded`: see `RecordedRequests`."""

    def __init__(
        self, usage: UsageLog, clock: Clock, heard: Callable[[], Set[Owner]], recorded: Recorded, running: Set[str]
    ) -> None:
        """`running`: ids of the requests that run in this gateway."""
        self._usage, self._clock, self._heard, self._recorded = usage, clock, heard, recorded
        self._running = running
        self._orphans = Orphans(usage.own)
        self._known: Set[Owner] = frozenset()
        self._look_at, self._is_left = -math.inf, False

    async def look(self) -> None:
        """Writes the records that are due. Called about once a second. Raises LogUnavailableError."""
        heard, now = self._heard(), self._clock.monotonic()
        if self._usage.own not in heard:
            return
        has_gone, self._known = bool(self._known - heard), heard
        if has_gone or self._is_left:
            self._look_at, self._is_left = min(self._look_at, now + limits.USAGE_LOOK_S), False
        if now < self._look_at:
            return
        opened = await self._usage.opened()
        for one in self._orphans.due(opened, heard, self._running, now):
            await self._decide(one, now)
        self._look_at = now + (limits.USAGE_LOOK_S if self._orphans.any else limits.USAGE_LOOK_ALL_S)

    def left(self) -> None:
        """This gateway has left a request that another run may continue."""
        self._is_left = True

    async def _decide(self, one: OpenRequest, now: float) -> None:
        request_id = one.started.request_id
        output = await self._recorded(request_id)
        if can_go_on(output, self._clock.time_ns() / 1e9):
            self._orphans.wait(request_id, now + _AGAIN_S)
        elif request_id not in self._running:  # else it was resumed here meanwhile
            await self._usage.end([lost(one.started, output)])
            log.info("the request %s of %s has ended without its gateway", request_id, one.started.gateway_id)
