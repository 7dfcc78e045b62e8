"""Stores finished responses for `limits.RESPONSE_TTL_S`, so that clients can retrieve and continue them.

`ResponseStore` is the interface. `log_store` keeps responses on the bus, for all gateways. `MemoryResponseStore` keeps
them in the memory of one gateway: they are lost when it ends, and other gateways do not have them.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from services.gateway.responses import pictures
from services.gateway.responses.input_items import Item
from shared import limits
from shared.errors import ServiceError
from shared.request.conversation import Turn
from shared.security.api_keys import ANONYMOUS

_OVERHEAD_BYTES, _ITEM_BYTES = 1024, 256
"""Estimated size of a record, and of each of its input items, besides their texts; upper bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One finished response. `turns`: the whole conversation with the output, without instructions.

    `encoded_bytes`: size of the request's body and of the encoded response together. `events`: the events of a
    background response, which can be streamed again; empty for other responses. `key_name`: name of the API key that
    created the response; no other key can see it.
    """

    response: dict[str, Any]
    input_items: list[Item]
    turns: list[Turn]
    encoded_bytes: int
    events: list[bytes] = field(default_factory=list[bytes])
    key_name: str = ANONYMOUS.name

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.response["id"]

    @property
    def num_bytes(self) -> int:
        """Size of the record in memory, an estimate."""
        turns = sum(len(turn.content) for turn in self.turns if isinstance(turn.content, str))
        urls = [part.image_url for part in pictures.parts_of(self.turns)]
        shown = sum(len(url) for url in urls if isinstance(url, str))
        calls = sum(len(msgspec.json.encode(turn.tool_calls)) for turn in self.turns if turn.tool_calls)
        overhead = _OVERHEAD_BYTES + _ITEM_BYTES * len(self.input_items)
        return overhead + self.encoded_bytes + turns + shown + calls + sum(map(len, self.events))


class ResponseStore(Protocol):
    """A store of finished responses."""

    async def keep(self, record: StoredResponse) -> None:
        """Stores a response that its client has not received.

        Raises LogUnavailableError; a record that is too large is dropped.
        """
        ...

    async def put(self, record: StoredResponse) -> None:
        """Stores a response. A record that is too large for the store is dropped at once."""
        ...

    async def get(self, response_id: str) -> StoredResponse | None:
        """Returns a response; None if it is not stored, or not any more. It may have references for pictures."""
        ...

    async def with_pictures(self, record: StoredResponse) -> StoredResponse:
        """Returns a response, which `get` has returned, with the data URLs of its pictures.

        Raises ServiceError('not_found') if one of them is not stored any more.
        """
        ...

    async def delete(self, response_id: str) -> bool:
        """Removes a response. Returns whether it was stored."""
        ...


class MemoryResponseStore:
    """Implements `ResponseStore` in memory: drops expired responses, then the least recently used ones.

    `now` returns monotonic seconds.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        max_bytes: int = limits.RESPONSES_BYTES_MAX,
        ttl_s: float = limits.RESPONSE_TTL_S,
    ) -> None:
        self._now = now
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._num_bytes = 0
        self._records: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        """Each record and its size, by id. The least recently used one is the first."""
        self._expires_at: dict[str, float] = {}
        """By id, in the order in which the records expire."""

    async def keep(self, record: StoredResponse) -> None:
        """See ResponseStore."""
        await self.put(record)

    async def put(self, record: StoredResponse) -> None:
        """See ResponseStore."""
        self._remove(record.id)
        size = record.num_bytes
        self._records[record.id] = (record, size)
        self._expires_at[record.id] = self._now() + self._ttl_s
        self._num_bytes += size
        self._shrink()

    async def get(self, response_id: str) -> StoredResponse | None:
        """See ResponseStore."""
        self._shrink()
        if response_id not in self._records:
            return None
        self._records.move_to_end(response_id)
        return self._records[response_id][0]

    async def with_pictures(self, record: StoredResponse) -> StoredResponse:
        """See ResponseStore. Here the pictures are in the record."""
        return record

    async def delete(self, response_id: str) -> bool:
        """See ResponseStore."""
        self._shrink()
        return self._remove(response_id)

    def _shrink(self) -> None:
        now = self._now()
        while self._expires_at and self._expires_at[first := next(iter(self._expires_at))] <= now:
            self._remove(first)
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._records)))

    def _remove(self, response_id: str) -> bool:
        found = self._records.pop(response_id, None)
        if found is None:
            return False
        self._num_bytes -= found[1]
        del self._expires_at[response_id]
        return True


def unknown_response(response_id: str) -> ServiceError:
    """Returns the error for a response that is not stored."""
    hours = limits.RESPONSE_TTL_S / 3600
    message = (
        f"Response with id '{response_id}' not found. A response is kept for {hours:g} hours or until the space is "
        "needed, and only if 'store' is not false."
    )
    return ServiceError("not_found", message, param="response_id")
