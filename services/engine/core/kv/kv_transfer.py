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
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import msgspec

from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.kv.prefix_cache import PrefixCache
from antiphon.services.engine.core.kv.state_pieces import StatePieces
from antiphon.services.engine.core.kv.states import NO_STATE
from antiphon.services.engine.core.kv.swap import SwapSpace
from antiphon.services.engine.core.kv.windows import Windows
from antiphon.services.engine.core.sequence import Sequence
from antiphon.shared.limits import KV_TRANSFER_TOKENS_MIN
from antiphon.shared.messages import EngineCounters, KvSource


class KvLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer to receive: the block named `hashes[i]` goes to `host_blocks[i]`. They hold `num_tokens` tokens.

    `address`: of the engine that has them; empty if they are in the tier below the KV cache (`tier`).
    """

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


class KvStore(msgspec.Struct, frozen=True):
    """Full blocks to write to the tier below the KV cache, `hashes[i]` from `block_ids[i]`."""

    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    keep_s: float = 0.0
    """How long they are to be kept there, seconds; 0: as long as there is room."""


class KvPin(msgspec.Struct, frozen=True):
    """Names of blocks in the tier that are to be kept there for at least `keep_s` seconds from now on."""

    hashes: tuple[bytes, ...]
    keep_s: float


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
    stores: tuple[KvStore, ...] = ()
    kept: tuple[bytes, ...] = ()
    """Names of blocks in use that are stored, of which another engine is to have copies."""
    pins: tuple[KvPin, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are any commands."""
        ours = self.opened, self.saves, self.dropped, self.loads, self.cancelled, self.stores, self.kept, self.pins
        return any(ours)


class KvLoaded(msgspec.Struct, frozen=True):
    """The end of a load: its first `num_blocks` blocks have been received and checked. Nothing is written any more."""

    transfer_id: str
    num_blocks: int
    took_s: float = 0.0
    """Of a load from the tier, without its wait for others."""


class KvReleased(msgspec.Struct, frozen=True):
    """Saved blocks that are not read any more."""

    block_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Load:
    """A load in progress, with the sequences that wait for it in order of arrival."""

    order: KvLoad
    num_skipped: int
    """Leading blocks that were in the prefix cache and are not loaded."""
    host_blocks: list[int]
    """The blocks among the order's, without columns and the pieces of a state."""
    host_windows: list[int]
    """The columns among them (`windows`), from `window_first` on."""
    window_first: int
    state: int = NO_STATE
    """The slot to which the state is loaded."""
    sequences: list[Sequence] = field(default_factory=list[Sequence])


class KvTransfers:
    """The transfers of one engine. Without transfers its methods cost no time."""

    def __init__(
        self,
        block_size: int,
        pool: BlockPool,
        swap: SwapSpace,
        prefix_cache: PrefixCache,
        pieces: StatePieces,
        windows: Windows,
        tally: EngineCounters,
    ) -> None:
        self._block_size = block_size
        self._pool, self._swap = pool, swap
        self._prefix_cache, self.pieces, self._windows = prefix_cache, pieces, windows
        self._tally = tally
        self._has_ending = bool(pieces.states or windows)
        """Whether the blocks are of use only with what comes after all of them: columns, or a recurrent state."""
        self._loads: dict[str, _Load] = {}
        self._saved: Counter[int] = Counter()
        """Number of references that the other half holds to each block of the pool."""
        self._opened: list[str] = []
        self._saves: list[KvSave] = []
        self._dropped: list[str] = []
        self._orders: list[KvLoad] = []
        self._cancelled: list[str] = []
        self._stores: list[KvStore] = []
        self.kept: list[bytes] = []
        """Names of stored blocks of which another engine is to have copies, for the next `plan_meta`."""
        self.pins: list[KvPin] = []
        """Stored blocks that are to be kept for a time, for the next `plan_meta`."""

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
        return (block for load in self._loads.values() for block in load.host_blocks + load.host_windows)

    def matched_tokens(self, sequence: Sequence, num_hits: int) -> int:
        """Returns how many tokens a transfer would add to `num_hits` cached blocks; 0 if a transfer is not worthwhile.

        The last token is always computed here, because the next token is sampled after it.
        """
        if not sequence.reuses_kv or (self.pieces.states and not self.pieces.count):
            return 0
        num_tokens = self._num_loadable(sequence) - num_hits * self._block_size
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
        num_hits = self.num_hits(sequence)
        if not self.matched_tokens(sequence, num_hits):
            return False
        if self._take_room(sequence, source, num_hits, self._num_loadable(sequence)):
            return True
        sequence.kv_miss = "no_room"
        self._tally.kv_failed_loads += 1
        return False

    def begin_stored(self, sequence: Sequence, transfer_id: str, num_hits: int, num_blocks: int) -> bool:
        """Starts to wait for the blocks [num_hits, num_blocks) of a new sequence from the tier below the KV cache.

        Returns False if there is no room on the host. Sequences with the same blocks, whose `transfer_id` is therefore
        equal, wait for the same load.
        """
        load = self._loads.get(transfer_id)
        if load is not None and load.sequences:
            load.sequences.append(sequence)
            return True
        return load is None and self._take_room(
            sequence, KvSource(transfer_id, ""), num_hits, num_blocks * self._block_size
        )

    def num_hits(self, sequence: Sequence) -> int:
        """Returns how many blocks of a sequence could be shared now."""
        cached = self._prefix_cache.lookup(sequence)
        return len(self._windows.usable(sequence, self.pieces.states.usable(cached)))

    def _take_room(self, sequence: Sequence, source: KvSource, num_hits: int, num_tokens: int) -> bool:
        """Takes host blocks for the first `num_tokens` tokens, without cached ones, and starts the load."""
        count = -(-num_tokens // self._block_size) - num_hits
        first = self._windows.paging.first_read(num_tokens)
        host_blocks = self._swap.allocate(count + self._windows.demand(first, 0, num_tokens))
        if host_blocks is not None and self.after_alloc(sequence, source, num_hits, host_blocks, num_tokens):
            return True
        self._swap.pool.free(host_blocks or ())
        return False

    def after_alloc(
        self, sequence: Sequence, source: KvSource, num_skipped: int, host_blocks: list[int], num_tokens: int
    ) -> bool:
        """Starts the load of the blocks after the first `num_skipped`, and of the columns or the state after them.

        They hold the first `num_tokens` tokens. `host_blocks`: for the blocks, and then for the columns. Returns False,
        without effect, if there is no slot for the state.
        """
        end, first = -(-num_tokens // self._block_size), self._windows.paging.first_read(num_tokens)
        names = self._prefix_cache.names(sequence)
        hashes = names[num_skipped:end] + self._window_names(names[first:end])
        slot, numbers = NO_STATE, list[int]()
        if self.pieces.states:
            taken = self.pieces.to_load()
            if taken is None:
                return False
            slot, numbers = taken
            hashes += self.pieces.names(names[end - 1])
        order = KvLoad(
            transfer_id=source.transfer_id,
            address=source.address,
            hashes=tuple(hashes),
            host_blocks=(*host_blocks, *numbers),
            num_tokens=num_tokens - num_skipped * self._block_size,
        )
        count = end - num_skipped
        self._loads[order.transfer_id] = _Load(
            order=order,
            num_skipped=num_skipped,
            host_blocks=host_blocks[:count],
            host_windows=host_blocks[count:],
            window_first=first,
            state=slot,
            sequences=[sequence],
        )
        self._orders.append(order)
        return True

    def _num_loadable(self, sequence: Sequence) -> int:
        """Returns how many tokens a transfer brings: all but the last one, with states or columns only full blocks."""
        if self._has_ending:
            return self.pieces.boundary(sequence.num_tokens, self._block_size)
        return sequence.num_tokens - 1

    def _window_names(self, names: list[bytes]) -> list[bytes]:
        return [name for each in names for name in self._windows.names(each)]

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
        blocks, count, complete = load.host_blocks, loaded.num_blocks, loaded.num_blocks == len(load.order.hashes)
        if self._has_ending:
            count = len(blocks) if complete else 0
        if self.pieces.states:
            self.pieces.loaded(load.state, wanted=complete and bool(load.sequences))
        for sequence in load.sequences:
            sequence.kv_miss = None if complete else "failed"
        if not load.sequences:
            self._swap.pool.free(blocks + load.host_windows)
            return []
        self._swap.pool.free(blocks[count:] + (load.host_windows if not count else []))
        is_stored = not load.order.address
        if not is_stored:
            self._tally.kv_loads += 1
            self._tally.kv_failed_loads += not complete
        if count:
            first, num_tokens = load.sequences[0], min(count * self._block_size, load.order.num_tokens)
            first.host_blocks, first.num_host_skipped = blocks[:count], load.num_skipped
            first.host_windows, first.host_window_first = load.host_windows, load.window_first
            first.num_host_tokens = load.num_skipped * self._block_size + num_tokens
            first.state = load.state
            self.pieces.states.park(first)
            first.loads_stored = is_stored
            if is_stored:
                self._tally.kv_tier_tokens += num_tokens
            else:
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
        if self._has_ending:
            return self._save_with_ending(sequence)
        num_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        complete = num_tokens == sequence.num_prompt_tokens
        end = -(-num_tokens // self._block_size) if complete else num_tokens // self._block_size
        if end > sequence.num_saved_blocks:
            self._save(sequence, end, num_tokens, complete=complete)

    def _save_with_ending(self, sequence: Sequence) -> None:
        """Passes on full blocks, and then the columns or the pieces of the state, which complete the transfer."""
        boundary = self.pieces.boundary(sequence.num_prompt_tokens, self._block_size)
        num_tokens, last = min(sequence.num_computed_tokens, boundary), boundary // self._block_size
        end = num_tokens // self._block_size
        travels = self.pieces.count or self._windows
        if not travels or sequence.num_saved_blocks > last or end <= sequence.num_saved_blocks < last:
            return
        numbers = self._ending(sequence, last) if end == last > 0 else None
        if numbers is not None or end > sequence.num_saved_blocks:
            self._save(sequence, end, num_tokens, complete=numbers is not None, more=numbers or ())
        if numbers is not None:
            sequence.num_saved_blocks = last + 1

    def _ending(self, sequence: Sequence, num_blocks: int) -> list[int] | None:
        """Holds what comes after the first `num_blocks` until it is sent. Returns its numbers; None if it is gone."""
        if self.pieces.states:
            return self.pieces.to_send(sequence.block_table[num_blocks - 1])
        held = self._windows.held(sequence, num_blocks * self._block_size)
        if held is None:
            return None
        self._pool.share(held[1])
        self._saved.update(held[1])
        return held[1]

    def _save(
        self, sequence: Sequence, end: int, num_tokens: int, *, complete: bool, more: "SequenceOf[int]" = ()
    ) -> None:
        """Passes on the blocks before `end`. `more`: the numbers of what comes after them."""
        first = sequence.num_saved_blocks
        blocks = sequence.block_table[first:end]
        self._pool.share(blocks)
        self._saved.update(blocks)
        every = self._prefix_cache.names(sequence, sequence.num_prompt_tokens)
        names = every[first:end]
        if more and self.pieces.states:
            names += self.pieces.names(every[end - 1])
        elif more:
            names += self._window_names(every[self._windows.paging.first_read(num_tokens) : end])
        num_in_last = min(num_tokens, end * self._block_size) - (end - 1) * self._block_size
        self._saves.append(
            KvSave(
                transfer_id=sequence.kv_transfer_id,
                hashes=tuple(names),
                block_ids=(*blocks, *more),
                num_tokens_in_last=num_in_last,
                complete=complete,
            )
        )
        self._tally.kv_saved_tokens += min(num_tokens, end * self._block_size) - first * self._block_size
        sequence.num_saved_blocks = end

    def store(self, order: KvStore) -> None:
        """Passes on what is to be written to the tier, with a reference to each block."""
        blocks = [block for block in order.block_ids if block < self._pool.num_blocks]
        self._pool.share(blocks)
        self._saved.update(blocks)
        self._stores.append(order)

    def end(self, sequence: Sequence) -> None:
        """Drops the transfer of a sequence that has ended, unless the whole prompt was saved."""
        num_blocks = -(-sequence.num_prompt_tokens // self._block_size)
        if self._has_ending:
            num_blocks = self.pieces.boundary(sequence.num_prompt_tokens, self._block_size) // self._block_size + 1
        if sequence.num_saved_blocks < num_blocks:
            self._dropped.append(sequence.kv_transfer_id)

    def released(self, released: KvReleased) -> None:
        """Removes the references to saved blocks."""
        blocks = [number for number in released.block_ids if number < self._pool.num_blocks]
        for piece in released.block_ids:
            if piece >= self._pool.num_blocks:
                self.pieces.sent(piece)
        for block in blocks:
            self._saved[block] -= 1
            assert self._saved[block] >= 0, f"block {block} was released more often than it was saved"
            if not self._saved[block]:
                del self._saved[block]
        self._pool.free(blocks)

    # --- both ---------------------------------------------------------------------------------------------------------

    def plan_meta(self) -> KvMeta:
        """Returns the commands for the other half, and clears them here."""
        ours = self._opened, self._saves, self._dropped, self._orders, self._cancelled
        lists = *ours, self._stores, self.kept, self.pins
        if not any(lists):
            return NOTHING
        opened, saves, dropped, orders, cancelled, stores, kept, pins = lists
        meta = KvMeta(
            opened=tuple(opened),
            saves=tuple(saves),
            dropped=tuple(dropped),
            loads=tuple(orders),
            cancelled=tuple(cancelled),
            stores=tuple(stores),
            kept=tuple(kept),
            pins=tuple(pins),
        )
        for each in lists:
            each.clear()
        return meta


NOTHING = KvMeta()
