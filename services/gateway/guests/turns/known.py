"""Leaves out events that an earlier run of a response has written. Pure.

A part of a response that was interrupted is run again from its beginning and gives the same events, because a model
step is deterministic. Only its texts may be divided into deltas in another way.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.edge.http import sse
from antiphon.shared.errors import ServiceError

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_DATA = b"\n" + sse.DATA


def told_by(event: bytes) -> dict[str, Any]:
    """Returns the object of an event."""
    return _decode(event.partition(_DATA)[2])


class KnownEvents:
    """The events that were written since the beginning of a part. `next_number`: number of the first further event."""

    def __init__(self, events: Sequence[bytes], next_number: int) -> None:
        self.next_number = next_number
        self._left = deque(told_by(event) for event in events)

    @property
    def is_over(self) -> bool:
        """Whether everything that is known has come again."""
        return not self._left

    def rest(self, data: bytes) -> bytes:
        """Returns the events of `data` that are new, with their numbers. Raises ServiceError if others were known."""
        found: list[bytes] = []
        for event in sse.split_events(data):
            if (told := self._new(told_by(event))) is not None:
                told["sequence_number"] = self.next_number
                self.next_number += 1
                found.append(sse.named_event(told["type"].encode(), _encode(told)))
        return b"".join(found)

    def _new(self, told: dict[str, Any]) -> dict[str, Any] | None:
        """Returns what is new of an event; None if nothing is."""
        if not self._left:
            return told
        if not _is_same_kind(self._left[0], told):
            raise _differs()
        if not told["type"].endswith(".delta"):
            self._left.popleft()
            return None
        text: str = told["delta"]
        while text and self._left:
            known: str = self._left[0]["delta"] if _is_same_kind(self._left[0], told) else ""
            size = min(len(known), len(text))
            if not known or known[:size] != text[:size]:
                raise _differs()
            text = text[size:]
            if size == len(known):
                self._left.popleft()
            else:
                self._left[0] = {**self._left[0], "delta": known[size:]}
        return {**told, "delta": text} if text else None


def _is_same_kind(known: dict[str, Any], told: dict[str, Any]) -> bool:
    return known["type"] == told["type"] and known.get("output_index") == told.get("output_index")


def _differs() -> ServiceError:
    return ServiceError("internal_error", "A model step that was run again came out differently, so the response ends.")
