"""Bytes and back: msgpack through msgspec, typed on the way in.

A reader names the message types it accepts; anything else (another type, damage, hostile nesting) is a `DecodeError`,
never another exception. Any msgpack library reads the bytes: an array whose first item is the type's name.
"""

import array
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, Union

import msgspec

from shared.limits import BATCH_BYTES_MAX
from shared.messages import Message

M = TypeVar("M", bound=Message, covariant=True)
T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_SWAP = sys.byteorder == "big"
TOKEN_BYTES = 4
"""Of one id in a packed token list."""


class DecodeError(ValueError):
    """The bytes are none of the expected messages."""


def encode(message: Message) -> bytes:
    """The message as bytes, of any length: the transport knows what the bus takes."""
    return _ENCODER.encode(message)


def encode_split(make: Callable[[Sequence[T]], Message], items: Sequence[T]) -> Iterator[tuple[Sequence[T], bytes]]:
    """Encodes `make(items)`, halved as often as needed to stay within BATCH_BYTES_MAX; yields each part with its bytes.

    A part of a single item may be larger.
    """
    data = _ENCODER.encode(make(items))
    if len(data) <= BATCH_BYTES_MAX or len(items) <= 1:
        yield items, data
        return
    half = len(items) // 2
    yield from encode_split(make, items[:half])
    yield from encode_split(make, items[half:])


class Decoder(Generic[M]):
    """Decodes one of a fixed set of message types."""

    def __init__(self, types: Iterable[type[M]]) -> None:
        self.types = tuple(types)
        assert self.types
        union: Any = Union[self.types]  # noqa: UP007 - built at run time
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes) -> M:
        """Raises DecodeError."""
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"not one of {[t.__name__ for t in self.types]}: {error}") from None


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = array.array("I", token_ids)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Raises DecodeError when the length is not a multiple of four."""
    if len(data) % TOKEN_BYTES:
        raise DecodeError(f"a packed token list of {len(data)} bytes")
    ids = array.array("I", data)
    if _SWAP:
        ids.byteswap()
    return ids.tolist()
