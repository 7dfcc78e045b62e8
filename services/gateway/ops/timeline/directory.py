"""The recorded requests of all gateways: those of this one, and the answers of the others over the bus.

A client may reach any gateway, and the request that it asks about may have been served by another one. A gateway that
does not answer within `limits.RECORD_QUERY_S` is named in the answer, which then lacks its requests.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from antiphon.services.gateway.ops.timeline.contention import contention, during, wait_of
from antiphon.services.gateway.ops.timeline.queries import find_record, list_records, ordered
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.shared import limits
from antiphon.shared.actors.actor import ask
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    ErrorReply,
    Heartbeat,
    Message,
    RecordList,
    RecordListQuery,
    RecordQuery,
    RecordReply,
)

log = logging.getLogger(__name__)
_LIST = Decoder([RecordList, ErrorReply])
_RECORD = Decoder([RecordReply, ErrorReply])


class FoundRecords(NamedTuple):
    """Summaries of requests, and the ids of the gateways that did not answer."""

    requests: list[dict[str, Any]]
    silent_gateways: list[str]


class RecordDirectory:
    """Finds recorded requests. This class knows the requests of one gateway; see `BusRecordDirectory`."""

    def __init__(self, recorder: Recorder, gateway_id: str = "") -> None:
        self.recorder = recorder
        self.gateway_id = gateway_id

    def answer(self, query: RecordListQuery | RecordQuery) -> RecordList | RecordReply:
        """Answers a question of another gateway about the requests of this one."""
        if isinstance(query, RecordQuery):
            return RecordReply(find_record(self.recorder, self.gateway_id, query))
        return RecordList(self.gateway_id, tuple(list_records(self.recorder, self.gateway_id, query)))

    async def list(self, query: RecordListQuery) -> FoundRecords:
        """Returns the requests of all gateways that match."""
        return FoundRecords(list_records(self.recorder, self.gateway_id, query), [])

    async def find(self, query: RecordQuery) -> dict[str, Any] | None:
        """Returns the summary or the timeline of one request, wherever it was served; None if there is none."""
        return find_record(self.recorder, self.gateway_id, query)

    async def timeline(self, name: str, key: str) -> dict[str, Any] | None:
        """Returns the timeline of one request that `key` may see (empty: all keys' requests); None if there is none.

        If the request waited for engines, the field `meanwhile` describes the requests that they computed during the
        wait (`timeline.contention`).
        """
        found = await self.find(RecordQuery(name, key, "timeline"))
        if found is None:
            return None
        wait = wait_of(found)
        if wait is None:
            return {**found, "meanwhile": None}
        others = (await self.list(RecordListQuery(key="", during=during(found, wait)))).requests
        return {**found, "meanwhile": contention(found, wait, [one for one in others if "phases" in one], key)}


class BusRecordDirectory(RecordDirectory):
    """The requests of all gateways. `gateways` returns the heartbeats of the living ones, this one included."""

    def __init__(self, recorder: Recorder, host: Host, gateways: Callable[[], Sequence[Heartbeat]]) -> None:
        super().__init__(recorder, host.id)
        self._host, self._gateways = host, gateways

    async def list(self, query: RecordListQuery) -> FoundRecords:
        """See RecordDirectory."""
        found, silent = list_records(self.recorder, self.gateway_id, query), list[str]()
        others = self._others()
        for beat, reply in zip(others, await asyncio.gather(*(self._ask(one, query) for one in others)), strict=True):
            if isinstance(reply, RecordList):
                found.extend(reply.requests)
            else:
                silent.append(beat.id)
        return FoundRecords(ordered(found, query), sorted(silent))

    async def find(self, query: RecordQuery) -> dict[str, Any] | None:
        """See RecordDirectory."""
        if (here := find_record(self.recorder, self.gateway_id, query)) is not None:
            return here
        replies = await asyncio.gather(*(self._ask(one, query) for one in self._others()))
        return next((one.found for one in replies if isinstance(one, RecordReply) and one.found is not None), None)

    def _others(self) -> "list[Heartbeat]":
        return [one for one in self._gateways() if (one.id, one.instance_id) != (self._host.id, self._host.instance_id)]

    async def _ask(self, gateway: Heartbeat, query: RecordListQuery | RecordQuery) -> Message | None:
        subject = self._host.subjects.gateway_peers(gateway.id, gateway.instance_id)
        expected: Decoder[Message] = _LIST if isinstance(query, RecordListQuery) else _RECORD
        try:
            return await ask(self._host.transport, subject, query, expected, timeout_s=limits.RECORD_QUERY_S)
        except (NoRespondersError, RequestTimeoutError, ServiceError) as error:
            log.warning("the gateway %s did not tell of its requests: %r", gateway.id, error)
            return None
