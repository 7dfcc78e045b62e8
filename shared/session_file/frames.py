"""What is in a session file: a head, then the blocks of KV, each in a frame (kind and length before its data).

A block is named by its place among the tokens and by `suffix`, which tells the blocks of windows and states that belong
to the same place apart. Its name in a store also depends on the tenant, so the file does not have it.
"""

import struct
from typing import NamedTuple

import msgspec

from antiphon.shared import limits
from antiphon.shared.recorded_request import RecordedContent, decode
from antiphon.shared.session_file.sealing import wrong_file

_FRAME = struct.Struct("<BI")
_BLOCK = struct.Struct("<IB")
_HEAD, _KV = 1, 2


class SessionHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of its session. `created`: of the export, Unix seconds."""

    created: float
    content: msgspec.Raw
    """The recorded request, see `recorded_request`."""
    weights: str
    """`ModelFacts.digest` of the model; empty: not known."""
    kv_form: str = ""
    """What determines the bytes of the blocks: `DiskTier.identity`. Empty:
    there are none."""
    block_size: int = 0
    """Tokens of a block; 0: there are none."""
    num_blocks: int = 0
    """Blocks that the file was begun with. It has fewer if some were deleted meanwhile."""


class FileBlock(NamedTuple):
    """A block of KV. `place`: its number among the tokens."""

    place: int
    suffix: bytes
    data: bytes


_HEADS = msgspec.json.Decoder(SessionHead)


def pack_head(head: SessionHead) -> bytes:
    """Returns the frame of a head."""
    return _frame(_HEAD, msgspec.json.encode(head))


def pack_block(block: FileBlock) -> bytes:
    """Returns the frame of a block."""
    fields = _BLOCK.pack(block.place, len(block.suffix))
    return _frame(_KV, fields + block.suffix + block.data)


def content_of(head: SessionHead) -> RecordedContent:
    """Returns the recorded request of a head. Raises ServiceError if it cannot be read."""
    return decode(bytes(head.content))


class FrameReader:
    """Reads frames from decrypted data: the head first, then blocks. Holds at most one frame."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._has_head = False

    def feed(self, data: bytes) -> list[SessionHead | FileBlock]:
        """Returns what is complete after further data. Raises ServiceError for what no export writes."""
        self._rest += data
        found: list[SessionHead | FileBlock] = []
        while len(self._rest) >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self._rest)
            if size > limits.SESSION_FRAME_BYTES or kind != (_KV if self._has_head else _HEAD):
                raise wrong_file("it has a part that this server does not know")
            if len(self._rest) < _FRAME.size + size:
                break
            data = bytes(self._rest[_FRAME.size : _FRAME.size + size])
            del self._rest[: _FRAME.size + size]
            found.append(_block(data) if kind == _KV else _head(data))
            self._has_head = True
        return found

    def finish(self) -> None:
        """Raises ServiceError if a frame is not complete, or if there was none."""
        if self._rest or not self._has_head:
            raise wrong_file("it is not complete")


def _frame(kind: int, data: bytes) -> bytes:
    return _FRAME.pack(kind, len(data)) + data


def _head(data: bytes) -> SessionHead:
    try:
        return _HEADS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong_file(f"its head cannot be read ({error})") from error


def _block(data: bytes) -> FileBlock:
    if len(data) <= _BLOCK.size:
        raise wrong_file("it has an empty block")
    index, length = _BLOCK.unpack_from(data)
    if length > limits.SESSION_SUFFIX_BYTES:
        raise wrong_file("it has a block with a name that is too long")
    start = _BLOCK.size
    return FileBlock(index, data[start : start + length], data[start + length :])
