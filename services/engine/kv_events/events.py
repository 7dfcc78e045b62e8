"""vLLM's KV events: their layout as msgpack, and the collector that makes them of what the prefix cache does.

A batch is an array, an event a map with its name under `type`; routers read the fields by name. Hashes are integers of
64 bits, as vLLM's are by default. Their values mean nothing outside of this engine: a router computes names of its own
from the tokens and the parent.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from antiphon.services.engine.core.sequence import Sequence
from antiphon.shared.blocks import root_hash

MEDIUM = "GPU"
"""vLLM's name for the KV cache of the device, also on a CPU."""
KIND = "full_attention"
_HASH_BYTES = 8


class KvEvent(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """An event of one engine's prefix cache. The tag is the name of the class."""


class BlockStored(KvEvent, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    """Consecutive blocks of a prompt are in the cache; `parent_block_hash` is the hash of the block before them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each block what its hash covers besides tokens, such as images; None if no block has anything."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(KvEvent, tag=True, omit_defaults=True, frozen=True, kw_only=True):
    """Blocks are not in the cache any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KvEvent, tag=True, omit_defaults=True, frozen=True):
    """The cache is empty: the engine has just started."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Events in their order. `ts`: Unix time, seconds."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


class EventCollector:
    """Collects the events of one engine. Called on the thread that steps, which never waits: `wake` must not either.

    With more than `events_max` events that nobody has taken, further ones are dropped and `lost` is set.
    """

    def __init__(self, block_size: int, events_max: int, wake: Callable[[], None]) -> None:
        self._block_size, self._events_max, self._wake = block_size, events_max, wake
        self._events: deque[KvEvent | int] = deque()
        """Events, and the hashes of removed blocks."""
        self.lost = False
        """Whether events were dropped since `take` was called last."""

    def stored(self, block_hash: bytes) -> None:
        """See BlockWatcher. Nothing is done: `published` knows the tokens."""

    def removed(self, block_hash: bytes) -> None:
        """See BlockWatcher."""
        self._add(_number(block_hash))

    def published(self, sequence: Sequence, first: int, end: int) -> None:
        """See `PrefixCache.on_published`."""
        size, hashes = self._block_size, sequence.block_hashes
        version = sequence.adapter_version or sequence.prompt_adapter_version
        stored = BlockStored(
            block_hashes=[_number(one) for one in hashes[first:end]],
            parent_block_hash=_number(hashes[first - 1]) if first else None,
            token_ids=sequence.tokens[first * size : end * size].tolist(),
            block_size=size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=version or None,
            extra_keys=_extra_keys(sequence, first, end, size),
            group_idx=0,
            kv_cache_spec_kind=KIND,
        )
        self._add(stored)

    def take(self) -> list[KvEvent]:
        """Returns the events since the last call. Adjacent removals are one event. On any thread, but one at a time."""
        found, removed = list[KvEvent](), list[int]()
        while self._events:
            one = self._events.popleft()
            if isinstance(one, int):
                removed.append(one)
                continue
            if removed:
                found.append(BlockRemoved(block_hashes=removed, medium=MEDIUM, group_idx=0))
                removed = []
            found.append(one)
        if removed:
            found.append(BlockRemoved(block_hashes=removed, medium=MEDIUM, group_idx=0))
        return found

    def _add(self, event: KvEvent | int) -> None:
        if len(self._events) >= self._events_max:
            self.lost = True
            return
        self._events.append(event)
        self._wake()


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_HASH_BYTES], "big")


def _extra_keys(sequence: Sequence, first: int, end: int, size: int) -> list[tuple[str, ...] | None] | None:
    """Returns what the hash of each block covers besides its tokens.

    A salt is a secret of its tenant, so its hash stands for it: a router then has another name for the block than for
    the same tokens without the salt.
    """
    if not sequence.cache_salt and not sequence.images:
        return None
    keys: list[tuple[str, ...] | None] = []
    for index in range(first, end):
        own = [one.key.hex() for one in sequence.images if index * size <= one.start < (index + 1) * size]
        if index == 0 and sequence.cache_salt:
            own.append(root_hash(sequence.cache_salt).hex())
        keys.append(tuple(own) or None)
    return keys if any(keys) else None
