"""Encodes messages as msgpack and decodes msgpack to typed messages, with the msgspec library.

A decoder is made for the message types that its user accepts. For all other input (another type, damaged bytes,
maliciously deep nesting) it raises `DecodeError` and no other exception. An encoded message is a msgpack array whose
first item is the type's name, so any msgpack library can read it.
"""

import array
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, Union

import msgspec

from antiphon.shared.limits import BATCH_BYTES_MAX
from antiphon.shared.messages import Message

M = TypeVar("M", bound=Message, covariant=True)
T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_SWAP = sys.byteorder == "big"
TOKEN_BYTES = 4
"""Bytes of one token id in a packed token list."""
FLOAT_BYTES = 4
"""Bytes of one number in a packed list of float32."""


class DecodeError(ValueError):
    """The bytes are not a message of an expected type, or not a packed token list."""


def encode(message: Message) -> bytes:
    """Returns the message as bytes. The length is not limited here: the transport checks the size limit of the bus."""
    return _ENCODER.encode(message)


def encode_split(make: Callable[[Sequence[T]], Message], items: Sequence[T]) -> Iterator[tuple[Sequence[T], bytes]]:
    """Encodes `make(items)`; if that exceeds BATCH_BYTES_MAX, splits `items` into halves, recursively.

    Yields each part of `items` with its encoded message. A part with a single item may exceed BATCH_BYTES_MAX.
    """
    data = _ENCODER.encode(make(items))
    if len(data) <= BATCH_BYTES_MAX or len(items) <= 1:
        yield items, data
        return
    half = len(items) // 2
    yield from encode_split(make, items[:half])
    yield from encode_split(make, items[half:])


class Decoder(Generic[M]):
    """Decodes messages of a fixed set of message types."""

    def __init__(self, types: Iterable[type[M]]) -> None:
        self.types = tuple(types)
        assert self.types
        union: Any = Union[self.types]  # noqa: UP007 - built at run time
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes) -> M:
        """Returns the decoded message. Raises DecodeError if `data` is not a message of one of the types."""
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"not one of {[t.__name__ for t in self.types]}: {error}") from None


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Returns token ids packed as little-endian u32."""
    packed = array.array("I", token_ids)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Returns the token ids of a packed list. Raises DecodeError if the length is not a multiple of four."""
    if len(data) % TOKEN_BYTES:
        raise DecodeError(f"a packed token list of {len(data)} bytes")
    ids = array.array("I", data)
    if _SWAP:
        ids.byteswap()
    return ids.tolist()


def unpack_floats(data: bytes) -> list[float]:
    """Returns the numbers of a packed list of little-endian float32. Raises DecodeError for a wrong length."""
    if len(data) % FLOAT_BYTES:
        raise DecodeError(f"a packed list of numbers of {len(data)} bytes")
    numbers = array.array("f", data)
    if _SWAP:
        numbers.byteswap()
    return numbers.tolist()
