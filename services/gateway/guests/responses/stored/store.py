"""Stores finished responses for `limits.RESPONSE_TTL_S`, so that clients can retrieve and continue them.

`ResponseStore` is the interface. `log_store` keeps responses on the bus, for all gateways. `MemoryResponseStore` keeps
them in the memory of one gateway: they are lost when it ends, and other gateways do not have them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from services.gateway.guests.responses import pictures
from services.gateway.guests.responses.input_items import Item
from shared import limits
from shared.errors import ServiceError
from shared.request.conversation import Turn
from shared.security.api_keys import ANONYMOUS
from shared.structures.kept import Kept

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

    async def get(self, response_id: str, /) -> StoredResponse | None:
        """Returns a response; None if it is not stored, or not any more. It may have references for pictures."""
        ...

    async def with_pictures(self, record: StoredResponse) -> StoredResponse:
        """Returns a response, which `get` has returned, with the data URLs of its pictures.

        Raises ServiceError('not_found') if one of them is not stored any more.
        """
        ...

    async def delete(self, response_id: str, /) -> bool:
        """Removes a response. Returns whether it was stored."""
        ...


R = TypeVar("R")


class MemoryRecords(Generic[R]):
    """Records in memory: drops expired ones, then the least recently used one of the largest key.

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
        self._ttl_s = ttl_s
        self._kept = Kept(max_bytes)
        self._records: dict[str, R] = {}
        """By id."""
        self._expires_at: dict[str, float] = {}
        """By id, in the order in which the records expire."""

    def add(self, key_name: str, record_id: str, record: R, num_bytes: int) -> None:
        """Keeps a record of an API key, of about `num_bytes`. One that is too large is dropped at once."""
        self._remove(record_id)
        self._records[record_id] = record
        self._expires_at[record_id] = self._now() + self._ttl_s
        self._expire()
        for gone in self._kept.put(key_name, record_id, num_bytes):
            self._remove(gone)

    async def get(self, record_id: str) -> R | None:
        """Returns a record; None if it is not kept, or not any more."""
        self._expire()
        self._kept.touch(record_id)
        return self._records.get(record_id)

    async def delete(self, record_id: str) -> bool:
        """Removes a record. Returns whether it was kept."""
        self._expire()
        return self._remove(record_id)

    def _expire(self) -> None:
        now = self._now()
        while self._expires_at and self._expires_at[first := next(iter(self._expires_at))] <= now:
            self._remove(first)

    def _remove(self, record_id: str) -> bool:
        self._kept.remove(record_id)
        self._expires_at.pop(record_id, None)
        return self._records.pop(record_id, None) is not None


class MemoryResponseStore(MemoryRecords[StoredResponse]):
    """Implements `ResponseStore` in memory."""

    async def put(self, record: StoredResponse) -> None:
        """See ResponseStore."""
        self.add(record.key_name, record.id, record, record.num_bytes)

    keep = put

    async def with_pictures(self, record: StoredResponse) -> StoredResponse:
        """See ResponseStore. Here the pictures are in the record."""
        return record


def unknown_response(response_id: str) -> ServiceError:
    """Returns the error for a response that is not stored."""
    hours = limits.RESPONSE_TTL_S / 3600
    message = (
        f"Response with id '{response_id}' not found. A response is kept for {hours:g} hours or until the space is "
        "needed, and only if 'store' is not false."
    )
    return ServiceError("not_found", message, param="response_id")
