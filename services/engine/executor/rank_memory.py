"""Access to the KV blocks of an engine with several ranks: joins the ranks' parts to whole blocks of the common layout.

A rank has the layers of its pipeline stage and its share of the key-value heads. The first rank reads and writes the
parts of the others over a separate socket pair to each, so that transfers do not wait for steps. Works only between
processes of one machine.

    first rank                                      other rank
    ReadBlock(block, num_tokens)        ->
                                        <-  the bytes of its part
    WriteBlock(host_block, num_tokens, data)  ->
                                        <-  an empty answer
"""

import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from antiphon.services.engine.executor.channel import MESSAGE_BYTES_MAX, ChannelClosed, receive_frame, send_frame
from antiphon.services.engine.kv.layout import KvLayout, KvMemory
from antiphon.services.engine.kv.pieces import Bytes, checksum
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.parallel.shard import Shard, local_kv_heads

logger = logging.getLogger(__name__)


class ReadBlock(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank for its part of the first tokens of a block of the KV cache."""

    block: int
    num_tokens: int


class WriteBlock(msgspec.Struct, frozen=True, tag=True):
    """Asks a rank to write the KV of a block's first tokens into its host memory. The reply is empty."""

    host_block: int
    num_tokens: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a whole block a rank has, and the connection to it; None for this process."""

    layers: slice
    heads: slice
    end: socket.socket | None

    def of(self, block: Bytes) -> Bytes:
        """Returns a view of this part of a block with the shape `KvLayout.shape(n)`."""
        return block[self.layers, :, :, self.heads]


def parts_of(
    whole: DecoderDescription, num_layers: int, shards: Sequence[Shard], ends: Sequence[socket.socket | None]
) -> Iterator[Part]:
    """Yields the part of the KV cache that each rank has, in the order of the ranks.

    `num_layers`: that of the whole layout, in which the layers of a slab (`models/kv_groups`) count once.
    With more ranks than key-value heads, several ranks have the same head, so parts may overlap.
    """
    for shard, end in zip(shards, ends, strict=True):
        layers, heads = shard.layers(num_layers), local_kv_heads(whole, shard)
        yield Part(slice(layers.start, layers.stop), slice(heads.start, heads.stop), end)


class RankMemory:
    """A `KvMemory` of all ranks. `own` is that of this process, whose part is `parts[0]`."""

    own = None
    """See `KvMemory`: engines may be divided differently."""

    def __init__(self, own: KvMemory, parts: Sequence[Part], num_layers: int, num_kv_heads: int) -> None:
        self._own, self._parts = own, parts
        local = own.layout
        self.layout = KvLayout(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_bytes=local.head_bytes,
            dtype=local.dtype,
            block_size=local.block_size,
            num_parts=local.num_parts,
        )
        self._lock = threading.Lock()

    def read(self, block: int, out: Bytes) -> int:
        """See `KvMemory`. Raises OSError if a rank has ended."""
        num_tokens, (first, *others) = out.shape[2], self._parts
        with self._lock:
            for part in others:
                _send(part, ReadBlock(block, num_tokens))
            mine = np.empty(self._own.layout.shape(num_tokens), dtype=np.uint8)
            self._own.read(block, mine)
            first.of(out)[:] = mine
            for part in others:
                target = part.of(out)
                target[:] = np.frombuffer(_answer(part), dtype=np.uint8).reshape(target.shape)
        return checksum(out)

    def write(self, host_block: int, data: Bytes) -> int:
        """See `KvMemory`. Raises OSError if a rank has ended."""
        num_tokens, (first, *others) = data.shape[2], self._parts
        with self._lock:
            for part in others:
                _send(part, WriteBlock(host_block, num_tokens, part.of(data).tobytes()))
            self._own.write(host_block, np.ascontiguousarray(first.of(data)))
            for part in others:
                _answer(part)
        return checksum(data)


def serve_blocks(memory: KvMemory, end: socket.socket) -> None:
    """The other ranks' side: answers requests until the connection ends. Runs on a separate thread."""
    decoder = msgspec.msgpack.Decoder(ReadBlock | WriteBlock)
    while True:
        try:
            order = decoder.decode(receive_frame(end, MESSAGE_BYTES_MAX))
            shape = memory.layout.shape(order.num_tokens)
            if isinstance(order, ReadBlock):
                part = np.empty(shape, dtype=np.uint8)
                memory.read(order.block, part)
                send_frame(end, part.tobytes())
            else:
                memory.write(order.host_block, np.frombuffer(order.data, dtype=np.uint8).reshape(shape))
                send_frame(end, b"")
        except (OSError, ChannelClosed):
            return


def _send(part: Part, order: ReadBlock | WriteBlock) -> None:
    assert part.end is not None
    send_frame(part.end, msgspec.msgpack.encode(order))


def _answer(part: Part) -> bytes:
    assert part.end is not None
    try:
        return receive_frame(part.end, MESSAGE_BYTES_MAX)
    except ChannelClosed as error:
        raise ConnectionError("a rank of this engine has ended") from error
