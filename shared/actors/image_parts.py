"""Reads image files and embeddings part by part from the process that has them."""

import asyncio
from collections.abc import Callable

from antiphon.shared import limits
from antiphon.shared.actors.actor import ask
from antiphon.shared.bus.transport import Transport
from antiphon.shared.codec import Decoder
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ErrorReply, ImagePart, Message

_PART = Decoder([ImagePart, ErrorReply])


async def read_parts(transport: Transport, subject: str, request: Callable[[int], Message], size: int) -> bytes:
    """Reads `size` bytes in parts; `request(offset)` returns the message that requests a part.

    Raises ServiceError('not_found') if the process does not have them, and what `transport.request` raises.
    """

    async def part(offset: int) -> bytes:
        reply = await ask(transport, subject, request(offset), _PART, timeout_s=limits.IMAGE_READ_S)
        assert isinstance(reply, ImagePart)
        if len(reply.data) != min(limits.IMAGE_PART_BYTES, size - offset):
            raise ServiceError("engine_failure", "An image, or its embeddings, came in another size than announced.")
        return reply.data

    offsets, found = list(range(0, size, limits.IMAGE_PART_BYTES)), list[bytes]()
    for first in range(0, len(offsets), limits.IMAGE_READS_MAX):
        found += await asyncio.gather(*map(part, offsets[first : first + limits.IMAGE_READS_MAX]))
    return b"".join(found)


def part_of(data: bytes, offset: int) -> ImagePart:
    """Returns the part that begins at `offset`. Raises ServiceError if there is none."""
    if not 0 <= offset < len(data):
        raise ServiceError("not_found", "The image has no part at this offset.")
    return ImagePart(data[offset : offset + limits.IMAGE_PART_BYTES])
