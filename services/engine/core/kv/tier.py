"""The tier below the KV cache: blocks that outlive the engine, on a disk. The scheduler's half, pure.

    load     a new sequence whose prefix is stored, beyond what is cached, waits until that is in host blocks
    store    blocks are passed on to be written when they are published, those of answers too; those of a prompt whose
             request asks for it are kept there for a time (`Sequence.kv_keep_s`)

Both are transfers (`kv_transfer`), with the tier in place of another engine. What is stored is known by the names of
blocks (`stored`), which are chains over all tokens before, so that a name cannot stand for other content. Columns of
windows and snapshots of states are stored under their names. Called by `core`.
"""

from collections.abc import Container
from collections.abc import Sequence as SequenceOf

from antiphon.services.engine.core.kv.kv_transfer import KvLoaded, KvPin, KvStore, KvTransfers
from antiphon.services.engine.core.kv.pace import Pace
from antiphon.services.engine.core.kv.prefix_cache import PrefixCache
from antiphon.services.engine.core.kv.windows import Windows
from antiphon.services.engine.core.sequence import Sequence
from antiphon.shared import limits
from antiphon.shared.messages import EngineCounters


class KvTier:
    """What one engine stores and loads. Without `stored` its methods do nothing."""

    def __init__(
        self,
        block_size: int,
        prefix_cache: PrefixCache,
        windows: Windows,
        transfers: KvTransfers,
        tally: EngineCounters,
    ) -> None:
        self._block_size = block_size
        self._prefix_cache, self._windows, self._transfers = prefix_cache, windows, transfers
        self._pieces, self._tally = transfers.pieces, tally
        self.stored: Container[bytes] | None = None
        """The names that can be loaded; None: there is no tier. May change at any time."""
        self.is_copied = False
        """Whether stored blocks have copies at another engine: then the names of blocks in use are passed on too."""
        self.tokens_min = limits.KV_TIER_TOKENS_MIN
        self.pace = Pace()

    def load(self, sequence: Sequence) -> bool:
        """Starts to wait for what is stored of a new sequence. Returns False if it should be queued at once."""
        if self.stored is None or not self._takes_part(sequence):
            return False
        num_hits = self._transfers.num_hits(sequence)
        end = self._num_stored(sequence, num_hits)
        if (end - num_hits) * self._block_size < self.tokens_min:
            sequence.kv_miss = "short" if end > num_hits else None
            return False
        if not self.pace.reading_is_faster():
            sequence.kv_miss = "slow"
            return False
        name = f"tier {sequence.block_hashes[end - 1].hex()} {num_hits}"
        begun = self._transfers.begin_stored(sequence, name, num_hits, end)
        sequence.kv_miss = None if begun else "no_room"
        return begun

    def loaded(self, result: KvLoaded) -> None:
        """Takes notice of how long a load from the tier took."""
        self.pace.has_read(result.num_blocks * self._block_size, result.took_s)

    def store(self, sequence: Sequence) -> None:
        """Passes on the blocks that have been published since the last call and are not stored."""
        if self.stored is None or not self._takes_part(sequence):
            return
        pinned: list[bytes] = []
        for index in range(sequence.num_stored_blocks, sequence.num_published_blocks):
            keep_s = sequence.kv_keep_s if (index + 1) * self._block_size <= sequence.num_prompt_tokens else 0.0
            name, block = sequence.block_hashes[index], sequence.block_table[index]
            names = [name]
            if not self._is_stored(names):
                self._transfers.store(KvStore((name,), (block,), keep_s))
                self._tally.kv_stored_tokens += self._block_size
            names += self._store_ending(sequence, index, block, keep_s)
            if keep_s:
                pinned += names
        if pinned:
            # After the stores above: what they write is there by then.
            self._transfers.pins.append(KvPin(tuple(pinned), sequence.kv_keep_s))
        sequence.num_stored_blocks = max(sequence.num_stored_blocks, sequence.num_published_blocks)

    def _store_ending(self, sequence: Sequence, index: int, block: int, keep_s: float) -> list[bytes]:
        """Passes on the column beside a block, and the snapshot of the state after it. Returns their names."""
        name, found = sequence.block_hashes[index], list[bytes]()
        if self._windows and index >= sequence.window_first:
            names = self._windows.names(name)
            found += names
            if not self._is_stored(names):
                column = self._windows.columns(sequence, index, index + 1)
                self._transfers.store(KvStore(tuple(names), tuple(column), keep_s))
        if self._pieces.count:
            names = self._pieces.names(name)
            found += names
            if not self._is_stored(names) and (numbers := self._pieces.to_send(block)) is not None:
                self._transfers.store(KvStore(tuple(names), tuple(numbers), keep_s))
        return found

    def _is_stored(self, names: SequenceOf[bytes]) -> bool:
        """Whether blocks in use that belong together are stored. If so, the engine with the copies has to have them."""
        assert self.stored is not None
        found = names[-1] in self.stored
        if found and self.is_copied:
            self._transfers.kept += names
        return found

    def _takes_part(self, sequence: Sequence) -> bool:
        """Whether KV of a sequence is loaded and stored: not of a short one, which is computed in the same time."""
        travels = self._pieces.count > 0 or not self._pieces.states
        is_long = sequence.num_tokens > self.tokens_min
        return travels and is_long and sequence.reuses_kv and not sequence.canary

    def _num_stored(self, sequence: Sequence, num_hits: int) -> int:
        """Returns how many leading blocks can be had, with the tier, and with all that the next token reads."""
        assert self.stored is not None
        # The last token is computed here, because the next one is sampled after it.
        most = (sequence.num_tokens - 1) // self._block_size
        names, end = self._prefix_cache.names(sequence, most * self._block_size), num_hits
        while end < most and names[end] in self.stored:
            end += 1
        while end > num_hits and not self._has_ending(names, end):
            end -= 1
        return end

    def _has_ending(self, names: list[bytes], end: int) -> bool:
        """Whether the columns, or the state, that a token after the first `end` blocks reads are stored."""
        assert self.stored is not None
        wanted = self._pieces.names(names[end - 1])
        if self._windows:
            first = self._windows.paging.first_read(end * self._block_size)
            wanted = [each for name in names[first:end] for each in self._windows.names(name)]
        return all(name in self.stored for name in wanted)
