"""The slots of recurrent states: which sequence or block has which, and which slots a step reads and writes. No I/O.

In a layer with a recurrent state, all that later tokens need of a sequence's tokens is one state of a fixed size. A
slot holds the states of all such layers after some number of tokens. A step reads the slot of a sequence's state and
writes the state after its tokens, into the same slot if nothing else needs the former state. A slot may be

    live       a running sequence holds it: its state after the scheduled tokens
    a trail    a running sequence holds it: a state after fewer tokens, to which a rejected token takes it back
    a snapshot it belongs to a full block: the state after the block's last token
    parked     a preempted sequence, whose KV is on the host, has it until it runs again, or until it is needed

A prefix can be reused up to the last of its cached blocks that has a snapshot; the new sequence reads the snapshot and
writes elsewhere. Snapshots are only a cache: one that no sequence holds is given away, the least recently used first,
when a slot is needed or when its block is reused, and then tokens are computed again.

Snapshots are made after every `interval` tokens, at the end of the prompt (the next turn of a chat begins with it), and
where a cached prefix went on without a snapshot, because prompts that have parted there once part there again. Steps
run in order, so a later plan may reuse a slot that an earlier one still reads; within a plan no slot has two uses.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.kv.snapshots import Snapshots
from antiphon.services.engine.core.sequence import Sequence

NO_STATE = -1
_SLOTS_TO_JOIN = 3
"""The state after the first step, one before its last token, and the snapshot that the sequence starts from."""


class StatePool:
    """The slots of an engine, numbered 0 to num_slots - 1; with 0 slots the model has no states.

    `interval`: tokens from one snapshot to the next, a multiple of the block size. `caching`: whether to make any.
    """

    def __init__(self, num_slots: int, interval: int, block_size: int, pool: BlockPool, *, caching: bool) -> None:
        assert not num_slots or interval % block_size == 0
        self.num_slots, self._interval, self._block_size, self._caching = num_slots, interval, block_size, caching
        self._refs = [0] * num_slots
        self.snapshots = Snapshots()
        self._free = list(range(num_slots - 1, -1, -1))
        self._freed: list[int] = []
        """Slots that are free once the plan under construction is complete, because it reads or writes them."""
        self._busy: set[int] = set()
        """The slots that the plan under construction reads or writes."""
        self._parked: OrderedDict[int, Sequence] = OrderedDict()
        """Those of preempted sequences, the one that has waited longest first."""
        self._used = [0] * num_slots
        """The last step that reads or writes each slot."""
        self._step = 0
        self.num_applied = 0
        """Number of the last step whose result is known."""
        if num_slots:
            pool.on_reuse = self.forget

    def __bool__(self) -> bool:
        """Whether the model has states."""
        return self.num_slots > 0

    def usable(self, blocks: list[int]) -> list[int]:
        """Returns the blocks of a computed prefix up to the last one with a snapshot; all of them without states."""
        return self.snapshots.usable(blocks) if self else blocks

    def forget(self, block: int) -> None:
        """Drops the snapshot of a block that gets other content."""
        slot = self.snapshots.of(block)
        if slot is not None:
            self.snapshots.remove(slot)
            if not self._refs[slot]:
                self._free_slot(slot)

    # --- sequences ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of slots that the plan under construction can still use, snapshots that no sequence holds included."""
        resting, parked = self.snapshots.resting(), self._parked.keys()
        return len(self._free) + len(resting) + len(parked) - len(self._busy & resting) - len(self._busy & parked)

    def has_room(self) -> bool:
        """Whether a sequence that joins now finds the slots for its first step."""
        return not self or self.num_free >= _SLOTS_TO_JOIN

    def start(self, sequence: Sequence, blocks: list[int], num_known: int, *, goes_on: bool) -> None:
        """Gives a joining sequence the snapshot of the last of its reused blocks, or its own parked state.

        `num_known`: number of leading tokens whose blocks are cached, with a snapshot or without. `goes_on`: whether
        it goes on with its parked state.
        """
        if not self:
            return
        if goes_on:
            self._parked.pop(sequence.state, None)
        else:
            self.release(sequence)
        last = (sequence.num_tokens - 1) // self._block_size * self._block_size
        sequence.snapshots_at = (last, num_known)
        if not goes_on:
            slot = self.snapshots.of(blocks[-1]) if blocks else None
            sequence.state = NO_STATE if slot is None else self._hold(slot)

    def release(self, sequence: Sequence) -> None:
        """Takes the slots of a sequence back."""
        self._drop_trail(sequence)
        self._parked.pop(sequence.state, None)
        self.drop(sequence.state)
        sequence.state = NO_STATE

    def park(self, sequence: Sequence) -> None:
        """Leaves its state to a sequence that is preempted, until the slot is needed: `Sequence.state` tells."""
        self._drop_trail(sequence)
        if sequence.state >= 0 and self._refs[sequence.state] == 1:
            self._parked[sequence.state] = sequence
        else:
            self.release(sequence)

    def hold_snapshot(self, block: int) -> int | None:
        """Holds the snapshot of a block until `drop`, and returns its slot; None if there is none."""
        slot = self.snapshots.of(block)
        return None if slot is None else self._hold(slot)

    def take_unused(self) -> int | None:
        """Takes a slot that no step in flight uses, for a state from elsewhere; None if there is none."""
        candidates = (*self._free, *self.snapshots.resting())
        slot = next((each for each in candidates if self._used[each] <= self.num_applied), None)
        if slot is None:
            return None
        if slot in self.snapshots:
            self.snapshots.remove(slot)
        else:
            self._free.remove(slot)
        return self._hold(slot)

    def begin_plan(self, step: int) -> None:
        """To be called before the plan of a step is made."""
        self._step = step
        self._busy.clear()
        if self._freed:
            self._free += self._freed
            self._freed.clear()

    def plan(self, sequence: Sequence, num_tokens: int, num_draft_tokens: int = 0) -> bool:
        """Chooses the slots for the sequence's next `num_tokens`, drafts included: `state_share` then has them.

        Returns False, without effect, if there are not enough slots. The block table must have the blocks.
        """
        if not self:
            return True
        start = sequence.num_scheduled_tokens
        end = start + num_tokens
        source = sequence.state
        trail = _trail(sequence, start, end, num_draft_tokens)
        places = self._snapshots_in(sequence, start, end - num_draft_tokens)
        stays = source >= 0 and self._is_own(source) and start not in trail and end not in places
        given = {end: source} if stays else dict[int, int]()
        needed = {*trail, end} - {start, *given}
        if len(needed) > self.num_free:
            return False
        for position in (*needed, *(place for place in places if place not in needed)):
            if (slot := self._take()) is not None:
                given[position] = slot
        self._use(sequence, start, end, given, trail)
        for position in places:
            if position in given:
                block = self._block_before(sequence, position)
                self.snapshots.add(block, given[position])
                if not self._refs[given[position]]:
                    self.snapshots.rest(given[position])
        return True

    def settle(self, sequence: Sequence, planned: int, num_tokens: int) -> None:
        """Applies the result of a step after which `planned` tokens were to be computed, and `num_tokens` are."""
        if num_tokens < planned:
            found = [slot for position, slot in sequence.state_trail if position == num_tokens]
            assert found or not num_tokens, f"{sequence.sequence_id}: no state after {num_tokens} tokens"
            self.drop(sequence.state)
            sequence.state = self._hold(found[0]) if found else NO_STATE
        self._drop_trail(sequence, planned)

    def follow(self, sequences: list[Sequence], sources: list[int]) -> None:
        """Makes sequence i continue the state of sequence `sources[i]`, which several may share."""
        if not self:
            return
        former = [sequence.state for sequence in sequences]
        for sequence, source in zip(sequences, sources, strict=True):
            sequence.state = self._hold(former[source])
        for slot in former:
            self.drop(slot)

    def drop(self, slot: int) -> None:
        """Ends one hold of a slot; nothing for -1."""
        if slot < 0:
            return
        self._refs[slot] -= 1
        assert self._refs[slot] >= 0, f"slot {slot} was dropped more often than it was held"
        if not self._refs[slot]:
            if slot in self.snapshots:
                self.snapshots.rest(slot)
            else:
                self._free_slot(slot)

    # --- for tests ----------------------------------------------------------------------------------------------------

    def check(self, holders: Iterable[Sequence], others: Counter[int]) -> None:
        """Raises AssertionError if a slot is not free, a snapshot or held by as many sequences as it counts.

        `others`: how often slots are held by others than sequences.
        """
        refs = [others[slot] for slot in range(self.num_slots)]
        for sequence in holders:
            for slot in (sequence.state, *(slot for _, slot in sequence.state_trail)):
                if slot >= 0:
                    refs[slot] += 1
        assert refs == self._refs, f"{self._refs} holders counted, {refs} found"
        free = [*self._free, *self._freed]
        unheld = [slot for slot in range(self.num_slots) if not refs[slot]]
        assert sorted([*free, *self.snapshots.resting()]) == unheld, "a slot is lost, or free twice"
        assert not any(slot in self.snapshots for slot in free), "a free slot belongs to a block"

    # ------------------------------------------------------------------------------------------------------------------

    def _snapshots_in(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Returns the positions in (start, end] after which a snapshot is made."""
        if not self._caching or sequence.canary:
            return []
        first = start // self._interval * self._interval + self._interval
        places = {*range(first, end + 1, self._interval), *sequence.snapshots_at}
        places = {place for place in places if start < place <= end}
        return [place for place in places if self.snapshots.of(self._block_before(sequence, place)) is None]

    def _block_before(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // self._block_size - 1]

    def _use(self, sequence: Sequence, start: int, end: int, given: dict[int, int], trail: list[int]) -> None:
        source = sequence.state
        # First of all: a slot that is dropped below must not be used twice in the plan.
        self._busy.update((source, *given.values()))
        for slot in (source, *given.values()):
            if slot >= 0:
                self._used[slot] = self._step
        kept = {**given, start: source}
        sequence.state_trail += [(position, self._hold(kept[position])) for position in trail if kept[position] >= 0]
        if given[end] != source:
            self.drop(source)
            sequence.state = self._hold(given[end])
        writes = tuple((position - start, slot) for position, slot in sorted(given.items()))
        sequence.state_share = (source, writes)

    def _is_own(self, slot: int) -> bool:
        return self._refs[slot] == 1 and slot not in self.snapshots and slot not in self._busy

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        slot = next((each for each in self.snapshots.resting() if each not in self._busy), None)
        if slot is not None:
            self.snapshots.remove(slot)
            return slot
        slot = next((each for each in self._parked if each not in self._busy), None)
        if slot is not None:
            self._parked.pop(slot).state = NO_STATE
            self._refs[slot] = 0
        return slot

    def _hold(self, slot: int) -> int:
        if slot >= 0:
            self.snapshots.wake(slot)
            self._refs[slot] += 1
        return slot

    def _free_slot(self, slot: int) -> None:
        (self._freed if slot in self._busy else self._free).append(slot)

    def _drop_trail(self, sequence: Sequence, before: int | None = None) -> None:
        """Drops the trail, or the part of it that a step up to position `before` has left."""
        trail = sequence.state_trail
        if trail:
            sequence.state_trail = [] if before is None else [each for each in trail if each[0] >= before]
            for position, slot in trail:
                if before is None or position < before:
                    self.drop(slot)


def _trail(sequence: Sequence, start: int, end: int, num_draft_tokens: int) -> list[int]:
    """Returns the positions to which the result of a step may take the sequence back, drafts or a mask that waits."""
    num_known = end - num_draft_tokens
    samples = num_known == sequence.num_tokens + sequence.num_pending_tokens
    may_wait = samples and sequence.params.grammar is not None
    return list(range(max(start, num_known - may_wait), end))
