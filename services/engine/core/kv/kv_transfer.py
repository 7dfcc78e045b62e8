"""Transfers of KV blocks between engines: the scheduler's half. Pure; the other half is `antiphon.services.engine.kv`.

A prefill engine computes a prompt and saves its blocks for one receiver; a decode engine loads them into host blocks
and then continues as if the sequence had been swapped out (`swap`):

    receiver   matched_tokens()   number of tokens that a transfer would add to the prefix cache hit
               after_alloc()      takes host blocks; the sequence waits in WAITING_FOR_KV
               finished()         the load has ended, with all blocks or with fewer: the sequence is queued
    sender     open(), save()     announces a transfer; passes on the blocks that have been computed since
               released()         the receiver has the blocks, or no longer needs them
    both       plan_meta()        commands for the other half since the last call: begin or stop transfers

If a load ends early, the receiver computes the missing tokens; there is no other effect. Blocks are named by their
content (`antiphon.shared.blocks`), so a receiver does not load what its prefix cache holds, and cannot load other
content. Both engines hold their blocks until the other half, which moves the bytes, no longer uses them, even if the
sequence has been aborted meanwhile. Called by `core`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.kv.prefix_cache import PrefixCache
from antiphon.services.engine.core.kv.swap import SwapSpace
from antiphon.services.engine.core.sequence import Sequence
from antiphon.shared.limits import KV_TRANSFER_TOKENS_MIN
from antiphon.shared.messages import EngineCounters, KvSource


class KvLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer to receive: the block named `hashes[i]` goes to `host_blocks[i]`. They hold `num_tokens` tokens."""

    transfer_id: str
    address: str
    hashes: tuple[bytes, ...]
    host_blocks: tuple[int, ...]
    num_tokens: int


class KvSave(msgspec.Struct, frozen=True, kw_only=True):
    """Computed blocks of a transfer to send. All are full, except that the last one may hold `num_tokens_in_last`."""

    transfer_id: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    num_tokens_in_last: int
    complete: bool
    """Whether these are the last blocks."""


class KvMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Commands of the scheduler's half for `services/engine/kv`, which carries them out in the order of the fields."""

    opened: tuple[str, ...] = ()
    """Transfers whose blocks will be computed."""
    saves: tuple[KvSave, ...] = ()
    dropped: tuple[str, ...] = ()
    """Announced transfers whose remaining blocks will not be computed."""
    loads: tuple[KvLoad, ...] = ()
    cancelled: tuple[str, ...] = ()
    """Loads for which no sequence waits any more. The end of each is still reported (`KvLoaded`)."""

    def __bool__(self) -> bool:
        """Whether there are any commands."""
        return bool(self.opened or self.saves or self.dropped or self.loads or self.cancelled)


class KvLoaded(msgspec.Struct, frozen=True):
    """The end of a load: its first `num_blocks` blocks have been received and checked. Nothing is written any more."""

    transfer_id: str
    num_blocks: int


class KvReleased(msgspec.Struct, frozen=True):
    """Saved blocks that are not read any more."""

    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Load:
    """A load in progress, with the sequences that wait for it in order of arrival."""

    order: KvLoad
    num_skipped: int
    """Leading blocks that were in the prefix cache and are not loaded."""
    sequences: list[Sequence] = field(default_factory=list[Sequence])


class KvTransfers:
    """The transfers of one engine. Without transfers its methods cost no time."""

    def __init__(
        self, block_size: int, pool: BlockPool, swap: SwapSpace, prefix_cache: PrefixCache, tally: EngineCounters
    ) -> None:
        self._block_size = block_size
        self._pool, self._swap = pool, swap
        self._prefix_cache = prefix_cache
        self._tally = tally
        self._loads: dict[str, _Load] = {}
        self._saved: Counter[int] = Counter()
        """Number of references that the other half holds to each block of the pool."""
        self._opened: list[str] = []
        self._saves: list[KvSave] = []
        self._dropped: list[str] = []
        self._orders: list[KvLoad] = []
        self._cancelled: list[str] = []

    # --- receiving ----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for a load."""
        return sum(len(load.sequences) for load in self._loads.values())

    def waiting(self) -> Iterator[Sequence]:
        """Returns the sequences that wait for a load."""
        return (sequence for load in self._loads.values() for sequence in load.sequences)

    def host_blocks(self) -> Iterator[int]:
        """Returns the host blocks that loads in progress write to."""
        return (block for load in self._loads.values() for block in load.order.host_blocks)

    def matched_tokens(self, sequence: Sequence, num_hits: int) -> int:
        """Returns how many tokens a transfer would add to `num_hits` cached blocks; 0 if a transfer is not worthwhile.

        The last token is always computed here, because the next token is sampled after it.
        """
        if not sequence.reuses_kv:
            return 0
        num_tokens = sequence.num_tokens - 1 - num_hits * self._block_size
        return num_tokens if num_tokens >= KV_TRANSFER_TOKENS_MIN else 0

    def begin(self, sequence: Sequence, source: KvSource) -> bool:
        """Starts to wait for a new sequence's KV. Returns False if the sequence should be queued at once.

        A sequence with the same prompt and transfer as an earlier one waits for the same load.
        """
        load = self._loads.get(source.transfer_id)
        if load is not None:
            if not load.sequences or load.sequences[0].tokens != sequence.tokens:
                return False
            load.sequences.append(sequence)
            return True
        num_hits = len(self._prefix_cache.lookup(sequence))
        if not self.matched_tokens(sequence, num_hits):
            return False
        count = -(-(sequence.num_tokens - 1) // self._block_size) - num_hits
        host_blocks = self._swap.allocate(count)
        if host_blocks is None:
            self._tally.kv_failed_loads += 1
            return False
        self.after_alloc(sequence, source, num_hits, host_blocks)
        return True

    def after_alloc(self, sequence: Sequence, source: KvSource, num_skipped: int, host_blocks: list[int]) -> None:
        """Starts the load of the blocks after the first `num_skipped` into `host_blocks`."""
        hashes = self._prefix_cache.names(sequence)[num_skipped : num_skipped + len(host_blocks)]
        num_tokens = sequence.num_tokens - 1 - num_skipped * self._block_size
        order = KvLoad(
            transfer_id=source.transfer_id,
            address=source.address,
            hashes=tuple(hashes),
            host_blocks=tuple(host_blocks),
            num_tokens=num_tokens,
        )
        self._loads[order.transfer_id] = _Load(order, num_skipped, [sequence])
        self._orders.append(order)

    def abandon(self, sequence: Sequence) -> None:
        """Ends the wait of an aborted sequence. The host blocks stay allocated until the load has `finished`."""
        for load in self._loads.values():
            if sequence in load.sequences:
                load.sequences.remove(sequence)
                if not load.sequences:
                    self._cancelled.append(load.order.transfer_id)
                return

    def finished(self, loaded: KvLoaded) -> list[Sequence]:
        """Applies the end of a load. Returns the sequences that waited for it, which the caller queues.

        The first of them gets the loaded blocks; the others find these in the prefix cache when they join.
        """
        load = self._loads.pop(loaded.transfer_id)
        blocks, count = list(load.order.host_blocks), loaded.num_blocks
        if not load.sequences:
            self._swap.pool.free(blocks)
            return []
        self._swap.pool.free(blocks[count:])
        self._tally.kv_loads += 1
        self._tally.kv_failed_loads += count < len(blocks)
        if count:
            first, num_tokens = load.sequences[0], min(count * self._block_size, load.order.num_tokens)
            first.host_blocks, first.num_host_skipped = blocks[:count], load.num_skipped
            first.num_host_tokens = load.num_skipped * self._block_size + num_tokens
            self._tally.kv_loaded_tokens += num_tokens
        return load.sequences

    # --- sending ------------------------------------------------------------------------------------------------------

    @property
    def num_saved_blocks(self) -> int:
        """Number of blocks that are held for receivers."""
        return len(self._saved)

    def saved_references(self) -> Counter[int]:
        """Returns how often each block is held for receivers."""
        return self._saved

    def open(self, sequence: Sequence) -> None:
        """Announces the transfer of a new sequence's prompt."""
        self._opened.append(sequence.kv_transfer_id)

    def save(self, sequence: Sequence) -> None:
        """Passes the blocks computed since the last call to the other half, with a reference to each.

        When the whole prompt is computed, its last block is passed on although it may not be full.
        """
        num_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        complete = num_tokens == sequence.num_prompt_tokens
        first, end = sequence.num_saved_blocks, num_tokens // self._block_size
        if complete:
            end = -(-num_tokens // self._block_size)
        if end <= first:
            return
        blocks = sequence.block_table[first:end]
        self._pool.share(blocks)
        self._saved.update(blocks)
        names = self._prefix_cache.names(sequence, sequence.num_prompt_tokens)[first:end]
        num_in_last = min(num_tokens, end * self._block_size) - (end - 1) * self._block_size
        self._saves.append(
            KvSave(
                transfer_id=sequence.kv_transfer_id,
                hashes=tuple(names),
                block_ids=tuple(blocks),
                num_tokens_in_last=num_in_last,
                complete=complete,
            )
        )
        self._tally.kv_saved_tokens += min(num_tokens, end * self._block_size) - first * self._block_size
        sequence.num_saved_blocks = end

    def end(self, sequence: Sequence) -> None:
        """Drops the transfer of a sequence that has ended, unless the whole prompt was saved."""
        if sequence.num_saved_blocks < -(-sequence.num_prompt_tokens // self._block_size):
            self._dropped.append(sequence.kv_transfer_id)

    def released(self, released: KvReleased) -> None:
        """Removes the references to saved blocks."""
        for block in released.block_ids:
            self._saved[block] -= 1
            assert self._saved[block] >= 0, f"block {block} was released more often than it was saved"
            if not self._saved[block]:
                del self._saved[block]
        self._pool.free(released.block_ids)

    # --- both ---------------------------------------------------------------------------------------------------------

    def plan_meta(self) -> KvMeta:
        """Returns the commands for the other half, and clears them here."""
        lists = (self._opened, self._saves, self._dropped, self._orders, self._cancelled)
        if not any(lists):
            return NOTHING
        opened, saves, dropped, orders, cancelled = lists
        meta = KvMeta(
            opened=tuple(opened),
            saves=tuple(saves),
            dropped=tuple(dropped),
            loads=tuple(orders),
            cancelled=tuple(cancelled),
        )
        for each in lists:
            each.clear()
        return meta


NOTHING = KvMeta()
