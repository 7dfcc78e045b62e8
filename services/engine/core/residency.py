"""The sequences that have a row and KV blocks: how they join, grow, are preempted and leave.

If a running sequence finds no free block, the youngest running sequence is preempted: its blocks are freed, it waits
again, and later its KV is loaded from the host's memory or recomputed (`swap`). The oldest sequence therefore always
progresses. A sequence in flight is not preempted, and its row and blocks are freed only when no plan in flight contains
it. When a plan is applied, its effect on a sequence is read from the plan itself, so there is no record of earlier
plans.

The beams of a beam search (`beam_group`) join and are preempted together: the leader waits until there are rows for all
of them, and a preempted search begins anew with its leader alone.

Not here: which sequence is next (`lanes`). Called by `core`, `scheduler` and the lanes.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from antiphon.services.engine.core.beams.beam_group import begin_anew, rearrange
from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.kv.origin import note_origin
from antiphon.services.engine.core.kv.prefix_cache import PrefixCache
from antiphon.services.engine.core.kv.reuse import Reusable, find_reusable
from antiphon.services.engine.core.kv.states import StatePool
from antiphon.services.engine.core.kv.swap import SwapSpace
from antiphon.services.engine.core.kv.windows import Windows
from antiphon.services.engine.core.plan import CoreLimits, ScheduledSequence
from antiphon.services.engine.core.policy.drafting import judge, propose
from antiphon.services.engine.core.policy.waiting import WaitingQueue
from antiphon.services.engine.core.rows import RowTable
from antiphon.services.engine.core.sequence import IDLE_AGE, Sequence, Status
from antiphon.services.engine.core.step_builder import StepBuilder
from antiphon.shared.messages import EngineCounters

_AGE = attrgetter("age")
STATES_OF_STEP = 3
"""Slots that must stay free for each running sequence when draft tokens take further ones."""
_FIRST_IDLE = (IDLE_AGE - 2**40, 0, 0)
"""An age between those of all ordinary and those of all idle sequences."""


class Yielding:
    """The running sequences that yield rows, adapter slots and blocks to others. Here there are none; see `lanes.idle`.

    `queue` has those of them that wait.
    """

    def __init__(self, queue: WaitingQueue) -> None:
        self.queue = queue

    @property
    def num_rows(self) -> int:
        """Number of rows that they hold, and those reserved for their beams to come."""
        return 0

    @property
    def holds_slots(self) -> bool:
        """Whether one of them uses a slot of an adapter."""
        return False

    def num_blocks(self) -> int:
        """Returns how many more blocks would be free if none of them ran."""
        return 0

    def give_way(self, *, for_a_slot: bool = False) -> bool:
        """Preempts one of them. Returns False if none can be preempted now.

        `for_a_slot`: only one that uses a slot of an adapter.
        """
        return False


class Residency:
    """Owns the running sequences, their rows and the queues; shares the block pool and the prefix cache with `core`."""

    def __init__(
        self,
        limits: CoreLimits,
        block_size: int,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        swap: SwapSpace,
        states: StatePool,
        windows: Windows,
        tally: EngineCounters,
    ) -> None:
        self.block_size, self.pool, self.prefix_cache, self.swap = block_size, pool, prefix_cache, swap
        self.states, self.windows = states, windows
        self.waiting = WaitingQueue()
        """The waiting sequences that are neither idle nor the canary."""
        self.yielding = Yielding(WaitingQueue(idle=True))
        self.running: list[Sequence] = []
        """In order of age, oldest first; the idle ones are last."""
        self.rows = RowTable(
            limits.max_num_seqs, limits.max_loras, limits.max_prompt_adapters, has_canary_row=limits.has_canary_row
        )
        self.preempted: list[str] = []
        """Ids of the sequences preempted since the step loop last cleared the list."""
        self._limits = limits
        self._tally = tally

    @property
    def num_running(self) -> int:
        """Number of running sequences, without the canary."""
        return len(self.running) - (bool(self.running) and self.running[0].canary)

    @property
    def num_ordinary(self) -> int:
        """Number of running sequences that are not idle; they come first in `running`."""
        return bisect_left(self.running, _FIRST_IDLE, key=_AGE)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the queues. The canary has none."""
        return self.waiting.num_waiting + self.yielding.queue.num_waiting

    def queue_of(self, sequence: Sequence) -> WaitingQueue:
        """Returns the queue in which the sequence waits, or from which it was taken."""
        return self.yielding.queue if sequence.idle else self.waiting

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    # --- joining and growing ------------------------------------------------------------------------------------------

    def join(self, head: Sequence, found: Reusable, builder: StepBuilder, most: int) -> int:
        """Gives the head of a queue a row and blocks, and schedules its tokens. Returns how many.

        With chunked prefill these are at most `most`. There must be a row, the adapters' slots and the blocks.
        """
        self.queue_of(head).pop(head, head.num_tokens - found.num_tokens)
        start, num_shared = found.num_tokens, len(found.shared)
        num_tokens = head.num_tokens - start
        if self._limits.enable_chunked_prefill:
            num_tokens = min(num_tokens, most)
        num_tokens = head.uncut(start, builder.limited(head, num_tokens))
        # Before the allocation: shared blocks on the free list would otherwise be given away as new ones.
        self.pool.share(found.reused)
        new_blocks = self.pool.allocate(self.blocks_for(start + num_tokens) - num_shared)
        assert new_blocks is not None, "a sequence that fits found no blocks"
        self.rows.take(head)
        self.rows.num_reserved += head.num_rows - 1
        head.block_table = found.shared + new_blocks
        new_windows = self.windows.start(head, found.window_first, found.window)
        head.num_published_blocks = num_shared
        if found.copied is not None:
            builder.copies.append((found.copied, new_blocks[0]))
            builder.copies += zip(found.copied_window, new_windows, strict=False)
        if found.from_host:
            self.swap.bring_back(head, first=num_shared)
        elif head.host_blocks:
            self.swap.drop(head)
        head.start_at(start)
        if found.from_host:
            # The plan's copies run before its computation, so others that join in it can already share them.
            self.prefix_cache.publish(head)
        self.states.start(head, found.shared, found.num_known, goes_on=found.from_host)
        has_states = self.states.plan(head, num_tokens)
        assert has_states, "a sequence that fits found no slots for its state"
        computed_elsewhere = found.from_host and not head.loads_stored
        if head.status is not Status.PREEMPTED:
            self._note_first_run(head, builder.step, num_shared * self.block_size if computed_elsewhere else start)
            note_origin(head, found, self.block_size, self._tally, has_cache=self._limits.enable_prefix_caching)
        builder.joined.append(head)
        builder.add(head, num_tokens)
        return num_tokens

    def enter(self, sequence: Sequence) -> None:
        """Makes a sequence that has a row run. To be called when the plan in which it joins is complete."""
        sequence.move_to(Status.RUNNING)
        insort(self.running, sequence, key=_AGE)

    def extend(self, sequence: Sequence, num_tokens: int, builder: StepBuilder, draft_budget: int | None) -> bool:
        """Schedules the next `num_tokens` of a running sequence and, unless `draft_budget` is None, draft tokens.

        Returns False if there are not enough blocks, see `_grow`. Draft tokens do not preempt other sequences.
        """
        draft_tokens: tuple[int, ...] = ()
        if draft_budget is not None:
            # Also without budget: a sequence that pauses its drafts counts its steps.
            if self.states:
                draft_budget = min(draft_budget, self.states.num_free - STATES_OF_STEP * len(self.running))
            # New blocks for drafts take a column each.
            room = (len(sequence.block_table) + self.pool.num_free // (1 + self.windows.groups)) * self.block_size
            draft_tokens = propose(sequence, min(draft_budget, room - sequence.num_tokens), self._tally)
        new_blocks = self._grow(sequence, num_tokens, len(draft_tokens))
        if new_blocks is None:
            return False
        if self.rows.is_vacant(sequence.row):
            self.rows.fill(sequence)
            builder.refill(sequence)
            new_blocks = []  # the plan sends the whole block table
        builder.add(sequence, num_tokens, new_blocks, draft_tokens, self.windows.last(sequence, len(new_blocks)))
        return True

    def find_reusable(self, sequence: Sequence) -> Reusable:
        """Returns the KV that a waiting sequence could reuse if it joined now, see `reuse`."""
        return find_reusable(sequence, self.prefix_cache, self.states, self.windows, self.block_size)

    def _grow(self, sequence: Sequence, num_tokens: int, num_draft_tokens: int) -> list[int] | None:
        """Takes blocks and slots of the state for the next tokens, preempting the youngest sequences if they are short.

        Returns the new blocks; None if there are not enough. Then the sequence itself was the youngest and has been
        preempted, or the youngest is in flight and cannot be preempted. In both cases no younger sequence may be
        scheduled in this step; otherwise this sequence could be passed over in every step.
        """
        num_tokens += num_draft_tokens
        while (new_blocks := self._take(sequence, num_tokens, num_draft_tokens)) is None:
            youngest = self.running[-1]
            together = youngest.beams or [youngest]
            if any(one.num_in_flight for one in together):
                return None
            gives_way = sequence in together
            self.preempt(youngest)
            if gives_way:
                return None
        return new_blocks

    def _take(self, sequence: Sequence, num_tokens: int, num_draft_tokens: int) -> list[int] | None:
        """Extends the block table. Returns the new blocks; None, without effect, if what is free is not enough."""
        table = sequence.block_table
        count = self.blocks_for(sequence.num_scheduled_tokens + num_tokens) - len(table)
        taken = self.pool.allocate(count * (1 + self.windows.groups)) if count > 0 else []
        if taken is None:
            return None
        new_blocks = taken[: max(0, count)]
        table += new_blocks
        sequence.window_blocks += taken[len(new_blocks) :]
        if self.states.plan(sequence, num_tokens, num_draft_tokens):
            return new_blocks
        self.pool.free(new_blocks)
        del table[len(table) - len(new_blocks) :]
        return None

    def _note_first_run(self, sequence: Sequence, step: int, num_found: int) -> None:
        """Records a sequence's first run. `num_found`: cached tokens except those that another engine has sent."""
        sequence.first_scheduled_step = step
        cached = min(num_found, sequence.num_prompt_tokens)
        sequence.num_cached_tokens = max(0, cached - sequence.num_virtual_tokens)
        self._tally.cached_tokens += sequence.num_cached_tokens
        if self._limits.enable_prefix_caching and sequence.reuses_kv:
            self._tally.prefix_cache_queries += sequence.num_tokens
            self._tally.prefix_cache_hits += num_found

    # --- results and beams --------------------------------------------------------------------------------------------

    def apply_result(self, share: ScheduledSequence, num_given: int) -> Sequence:
        """Applies the result of one scheduled sequence of the oldest plan in flight.

        `num_given`: number of tokens that the sequence got. Returns the sequence, which releases row and blocks if it
        is finished and no longer in flight. Rejected draft tokens count as never scheduled, as does the last known
        token if none was sampled after it; the blocks that were added for them stay in the block table.
        """
        sequence = self.rows[share.row]
        sequence.num_in_flight -= 1
        assert sequence.num_computed_tokens == share.start, f"plans were applied out of order: {share}"
        num_draft_tokens = len(share.draft_token_ids)
        sequence.num_pending_tokens -= share.samples + num_draft_tokens
        if share.num_drafts > 0:
            sequence.num_predicted_tokens = 0
        sequence.again = self._tally.step if share.samples and not num_given else 0
        num_wrong = int(sequence.again > 0)
        if num_draft_tokens:
            num_wrong += judge(sequence, num_draft_tokens, max(0, num_given - 1), self._tally)
        sequence.num_scheduled_tokens -= num_wrong
        sequence.num_computed_tokens = share.start + share.num_tokens - num_wrong
        if share.states and share.samples:
            self.states.settle(sequence, share.start + share.num_tokens, sequence.num_computed_tokens)
        if sequence.status is Status.FINISHED:
            self._release_unless_in_flight(sequence)
        return sequence

    def spread(self, beams: list[Sequence], further: list[Sequence]) -> None:
        """Adds the further beams of a search, whose leader has computed the prompt, in the rows reserved for them.

        The caller then calls `rearrange`.
        """
        for beam in further:
            self.rows.take_vacant(beam)
            self.queue_of(beam).count_running(beam)
            self.enter(beam)
        beams += further

    def rearrange(self, beams: list[Sequence], sources: list[int], token_ids: list[int]) -> None:
        """Makes beam i continue beam `sources[i]` with `token_ids[i]`, see `beam_group.rearrange`."""
        rearrange(beams, sources, token_ids, self.pool, self.windows, self.block_size)
        self.states.follow(beams, sources)
        for beam in beams:
            self.rows.vacate(beam)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence) -> None:
        """Preempts a running sequence, or all beams of a search, which then begins anew. None may be in flight."""
        if len(sequence.beams) > 1:
            sequence = self._drop_further_beams(sequence.beams)
        else:
            if sequence.reuses_kv and self.swap.store(sequence):
                self.states.park(sequence)
            if not sequence.has_prompt_logprobs:
                sequence.prompt_logprobs.clear()
            self.rows.num_reserved -= sequence.num_rows - 1
        sequence.move_to(Status.PREEMPTED)
        self._leave_running(sequence)
        self._release_unless_in_flight(sequence)
        sequence.start_at(0)
        self.queue_of(sequence).push(sequence)
        self._tally.preemptions += 1
        self._tally.idle_preemptions += sequence.idle
        self.preempted.append(sequence.sequence_id)

    def finish(self, sequence: Sequence) -> None:
        """Ends a running sequence and frees its row and blocks.

        If plans in flight contain the sequence, its row and blocks are freed when the last of these plans is applied.
        """
        sequence.move_to(Status.FINISHED)
        if len(sequence.beams) == 1:
            self.rows.num_reserved -= sequence.num_rows - 1
        self._leave_running(sequence)
        self._release_unless_in_flight(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Removes a queued sequence, whose status has just become finished, from its queue and from the host."""
        self.queue_of(sequence).forget(sequence)
        self.states.release(sequence)
        if sequence.host_blocks:
            self.swap.drop(sequence)

    def _drop_further_beams(self, beams: list[Sequence]) -> Sequence:
        """Ends all beams except the leader, with which the search begins anew. Returns the leader."""
        for beam in beams[1:]:
            self.finish(beam)
        begin_anew(beams, self.block_size)
        return beams[0]

    def _leave_running(self, sequence: Sequence) -> None:
        index = bisect_left(self.running, sequence.age, key=_AGE)
        assert self.running[index] is sequence, f"{sequence.sequence_id} is not among the running sequences"
        del self.running[index]
        if not sequence.canary:
            self.queue_of(sequence).stopped(sequence)

    def _release_unless_in_flight(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            return
        if not sequence.host_blocks:
            self.states.release(sequence)
        self.pool.free(sequence.block_table)
        self.windows.release(sequence)
        sequence.block_table = []
        sequence.num_published_blocks = 0
        self.rows.release(sequence)
