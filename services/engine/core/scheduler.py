"""The policy: which sequences compute which tokens in the next step.

There is no prefill phase and no decode phase. Of every sequence some tokens are known and some scheduled, and each
step lets the second number catch up with the first under one token budget; chunked prefill, prefix hits, preemption and
resumption are all the same case. Running sequences come first, oldest first, then waiting ones in queue order while
rows, blocks and budget last; none overtakes the head of the queue. A running sequence that finds no block takes those
of the youngest one, which waits again and comes back from the host's memory or recomputes (preemption, `swap`), so the
oldest always gets on.

Plans may be made ahead: `schedule` counts what is in flight as if it had come true, and the worker's own row supplies
the tokens that are not known here yet. Rows and blocks of a sequence are given back only when no plan in flight names
it, and a sequence in flight is not preempted: planning pauses for it instead. What a plan did to a sequence is read
from the plan when it lands, so there is no record of a "last plan".

Not here: stop conditions and results (`core`), block contents (`prefix_cache`), what a joining sequence need not
compute (`reuse`). Called by `core`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from services.engine.core.batching import BatchGate
from services.engine.core.block_pool import BlockPool
from services.engine.core.counters import Tally
from services.engine.core.delay import AdmissionDelay
from services.engine.core.payoff import Payoff
from services.engine.core.plan import CoreLimits, NewSequence, ScheduledSequence, StepPlan
from services.engine.core.prefix_cache import PrefixCache
from services.engine.core.reuse import Reusable, find_reusable
from services.engine.core.rows import RowTable
from services.engine.core.sequence import Sequence, Status
from services.engine.core.swap import SwapSpace
from services.engine.core.waiting import WaitingQueue

_AGE = attrgetter("age")


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    step: int
    budget: int
    now_s: float
    num_guessers: int = 0
    """Sequences that may still guess."""
    scheduled: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    joined: list[Sequence] = field(default_factory=list[Sequence])
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    num_tokens: int = 0
    num_guesses: int = 0

    def add(
        self, sequence: Sequence, num_tokens: int, new_blocks: Iterable[int] = (), guesses: tuple[int, ...] = ()
    ) -> None:
        """Schedules the sequence's next `num_tokens` and the guesses behind them; its blocks are there."""
        start = sequence.num_scheduled_tokens
        samples = start + num_tokens == len(sequence.tokens) + sequence.num_pending_tokens
        num_tokens += len(guesses)
        self.scheduled.append(ScheduledSequence(sequence.row, start, num_tokens, samples, tuple(new_blocks), guesses))
        sequence.num_scheduled_tokens = start + num_tokens
        sequence.num_pending_tokens += samples + len(guesses)
        sequence.num_drafted_tokens = len(guesses)
        sequence.num_in_flight += 1
        self.num_tokens += num_tokens
        self.num_guesses += len(guesses)
        self.num_guessers -= bool(guesses)
        self.budget = max(0, self.budget - num_tokens)


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Why the head of the queue did not fit. Until one of these changes it need not be looked up again."""

    sequence: Sequence
    num_blocks: int
    num_tokens: int
    first_miss: bytes | None


class Scheduler:
    """Owns the queue, the running sequences and the rows; shares the block pool and the prefix cache with `core`."""

    def __init__(
        self,
        limits: CoreLimits,
        block_size: int,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        swap: SwapSpace,
        tally: Tally,
    ) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """By age."""
        self.rows = RowTable(limits.max_num_seqs)
        self._limits = limits
        self._block_size = block_size
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._swap = swap
        ratio = limits.kv_cache_ratio
        self._reserve = 0 if ratio is None else pool.num_blocks - int(ratio * pool.num_blocks)
        self._delay = AdmissionDelay(limits.scheduler_delay_factor)
        self._payoff = Payoff()
        self.batches = BatchGate(limits.max_batch_size, limits.batch_wait_timeout)
        self._tally = tally
        self._shortage: _Shortage | None = None
        self._head_went_first = False

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self.waiting.push(sequence)

    def schedule(self, now_s: float) -> StepPlan:
        """Plans a step. An empty plan takes no step number; rows freed and copies out stay for the next one."""
        guessers = self._payoff.num_guessers(len(self.running), now_s)
        budget = self._limits.step_tokens(len(self.running), guessers)
        draft = _Draft(self._tally.step + 1, budget, now_s, guessers)
        may_join = self._may_join(now_s)
        if may_join:
            self._schedule_large_head(draft)
        if self._schedule_running(draft) and may_join:
            self._schedule_waiting(draft)
        return self._close(draft)

    def landed(self, step: int, now_s: float, num_right: int) -> None:
        """A step's result is in, with so many right guesses; its shares land one by one."""
        self._delay.landed(step, now_s)
        self._payoff.landed(step, now_s, num_right)

    def land(self, share: ScheduledSequence, num_given: int) -> Sequence:
        """Takes in that a share of the oldest plan in flight was computed and gave `num_given` tokens.

        Returns its sequence, which may be finished: then the last share gives its row and blocks back. Guesses that
        were wrong count as never scheduled; blocks that were added for them stay, for the tokens to come.
        """
        sequence = self.rows[share.row]
        sequence.num_in_flight -= 1
        assert sequence.num_computed_tokens == share.start, f"plans were applied out of order: {share}"
        num_guesses = len(share.draft_token_ids)
        sequence.num_pending_tokens -= share.samples + num_guesses
        num_wrong = 0
        if num_guesses:
            num_wrong = self._judge(sequence, num_guesses, num_given - 1)
        sequence.num_scheduled_tokens -= num_wrong
        sequence.num_computed_tokens = share.start + share.num_tokens - num_wrong
        if sequence.status is Status.FINISHED:
            self._release_unless_in_flight(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence for good, now or, if a plan in flight names it, when that lands."""
        was_running = sequence.status is Status.RUNNING
        sequence.move_to(Status.FINISHED)
        if was_running:
            self._leave_running(sequence)
            self._release_unless_in_flight(sequence)
        else:
            self.waiting.forget(sequence)
            self._swap.drop(sequence)

    # --- running sequences --------------------------------------------------------------------------------------------

    def _schedule_running(self, draft: _Draft) -> bool:
        """Serves the running sequences, oldest first. False when blocks ran out, so that nobody new may join."""
        num_running = len(self.running)
        index = 0
        # Preemption takes from the end of the list, so the index stays right.
        while index < len(self.running) and draft.budget > 0:
            sequence = self.running[index]
            num_tokens = min(sequence.num_unscheduled_tokens, draft.budget)
            if num_tokens > 0:
                guesses = (
                    self._guess(sequence, draft.budget - (len(self.running) - index)) if draft.num_guessers else ()
                )
                new_blocks = self._grow(sequence, num_tokens + len(guesses))
                if new_blocks is None:
                    return False
                draft.add(sequence, num_tokens, new_blocks, guesses)
            index += 1
        return len(self.running) == num_running

    def _guess(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        """Guesses for a sequence with one token to compute, never at the cost of another sequence's token or blocks."""
        if sequence.lookahead is None or sequence.num_in_flight or sequence.num_unscheduled_tokens != 1:
            return ()
        # One token comes in any case, and none after the last one that the sequence may have.
        most = min(budget, sequence.rules.max_tokens - sequence.num_output_tokens - 1)
        room = (len(sequence.block_table) + self._pool.num_free) * self._block_size - sequence.num_tokens
        guesses = sequence.lookahead.draft(sequence.tokens, min(most, room))
        self._tally.drafted_tokens += len(guesses)
        return guesses

    def _judge(self, sequence: Sequence, num_guesses: int, num_right: int) -> int:
        """Takes in how many guesses were right; returns how many were wrong."""
        assert 0 <= num_right <= num_guesses, f"{sequence.sequence_id}: {num_right} of {num_guesses} guesses right"
        assert sequence.lookahead is not None, f"{sequence.sequence_id} does not guess"
        sequence.lookahead.judge(num_guesses, num_right)
        sequence.num_drafted_tokens = 0
        self._tally.accepted_tokens += num_right
        return num_guesses - num_right

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[int] | tuple[()] | None:
        """Extends the block table for the next `num_tokens`, at the cost of younger sequences. Returns the new blocks.

        None: there are none. Then the sequence itself was the youngest and has been preempted, or the youngest is in
        flight; either way nothing younger may be scheduled in this step, or the sequence would be passed over for ever.
        """
        count = self._blocks_for(sequence.num_scheduled_tokens + num_tokens) - len(sequence.block_table)
        if count <= 0:
            return ()
        while (new_blocks := self._pool.allocate(count)) is None:
            youngest = self.running[-1]
            if youngest.num_in_flight:
                return None
            self._preempt(youngest)
            if youngest is sequence:
                return None
        sequence.block_table += new_blocks
        return new_blocks

    def _preempt(self, sequence: Sequence) -> None:
        sequence.move_to(Status.PREEMPTED)
        self._leave_running(sequence)
        self._swap.store(sequence)
        self._release_unless_in_flight(sequence)
        sequence.start_at(0)
        self.waiting.push(sequence)
        self._tally.preemptions += 1

    # --- waiting sequences --------------------------------------------------------------------------------------------

    def _may_join(self, now_s: float) -> bool:
        head = self.waiting.head()
        self.batches.look(head, self.waiting.num_waiting, now_s)
        if head is None or not self.batches.admits(head, 0):
            return False
        return self._delay.passed(now_s) or not self.running

    def _schedule_waiting(self, draft: _Draft) -> None:
        while draft.budget > 0 and self.rows.num_free and (sequence := self.waiting.head()):
            if not self.batches.admits(sequence, len(draft.joined)):
                return
            alone = not self.running and not draft.joined
            found = self._reusable_of_fitting(sequence, draft.budget, 0 if alone else self._reserve)
            if found is None:
                return
            self._join(sequence, found, draft)

    def _schedule_large_head(self, draft: _Draft) -> None:
        """Without chunked prefill: lets the head go before the running ones if these would never leave room for it.

        Its prompt may be longer than what they leave of the budget, or than the whole budget: then it runs alone. Not
        in two steps in a row, so that the running ones get at least every other step, and only if they need not be
        preempted for it.
        """
        went_first, self._head_went_first = self._head_went_first and bool(self.running), False
        head = None if self._limits.enable_chunked_prefill or went_first else self.waiting.head()
        if head is None or not self.rows.num_free or head.num_tokens + len(self.running) <= draft.budget:
            return
        tokens, blocks = self._demand_of_running()
        spare = blocks + (self._reserve if self.running else 0)
        found = self._reusable_of_fitting(head, max(draft.budget, head.num_tokens), spare)
        if found is None or head.num_tokens - found.num_tokens + tokens <= draft.budget:
            return
        self._join(head, found, draft)
        self._head_went_first = True

    def _demand_of_running(self) -> tuple[int, int]:
        """Tokens and new blocks that the running sequences want next."""
        tokens = blocks = 0
        for sequence in self.running:
            wanted = sequence.num_unscheduled_tokens
            tokens += wanted
            blocks += max(0, self._blocks_for(sequence.num_scheduled_tokens + wanted) - len(sequence.block_table))
        return tokens, blocks

    def _reusable_of_fitting(self, sequence: Sequence, budget: int, spare_blocks: int) -> Reusable | None:
        """What a waiting sequence need not compute, or None if it does not fit now.

        It fits if all its known tokens find blocks (even if only a part of them is to be scheduled now: a prefill that
        is preempted half-way is work lost), `spare_blocks` left free, and if the budget has room for them, or for any
        when prefill is chunked. One that has little to compute a step later waits for that.
        """
        num_free = self._pool.num_free - spare_blocks
        if not self._worth_a_lookup(sequence, budget, num_free):
            return None
        found = find_reusable(sequence, self._prefix_cache, self._block_size)
        if found.worth_waiting:
            return None
        num_free_hits = sum(map(self._pool.is_free, found.shared))
        num_blocks = self._blocks_for(sequence.num_tokens) - len(found.shared) + num_free_hits
        num_tokens = 1 if self._limits.enable_chunked_prefill else sequence.num_tokens - found.num_tokens
        if num_blocks <= num_free and num_tokens <= budget:
            return found
        first_miss = self._prefix_cache.first_miss(sequence, len(found.shared))
        self._shortage = _Shortage(sequence, num_blocks, num_tokens, first_miss)
        return None

    def _worth_a_lookup(self, sequence: Sequence, budget: int, num_free: int) -> bool:
        """False while a head that did not fit would not fit now either: looking it up costs time with its length."""
        shortage = self._shortage
        if shortage is None or shortage.sequence is not sequence:
            return True
        if shortage.num_blocks <= num_free and shortage.num_tokens <= budget:
            return True
        return shortage.first_miss is not None and self._pool.find(shortage.first_miss) is not None

    def _join(self, head: Sequence, found: Reusable, draft: _Draft) -> None:
        """Gives the head of the queue a row and blocks and schedules as much of it as the budget or the mode allows."""
        self._shortage = None
        self.waiting.pop()
        start, num_shared = found.num_tokens, len(found.shared)
        num_tokens = head.num_tokens - start
        if self._limits.enable_chunked_prefill:
            num_tokens = min(num_tokens, draft.budget)
        self._pool.share(found.shared)
        new_blocks = self._pool.allocate(self._blocks_for(start + num_tokens) - num_shared)
        assert new_blocks is not None, "a sequence that fits found no blocks"
        self.rows.take(head)
        head.block_table = found.shared + new_blocks
        head.num_published_blocks = num_shared
        if found.copied is not None:
            draft.copies.append((found.copied, new_blocks[0]))
        self._swap.bring_back(head, first=num_shared)
        head.start_at(start)
        self._note_first_run(head, draft.step)
        draft.joined.append(head)
        draft.add(head, num_tokens)

    def _note_first_run(self, sequence: Sequence, step: int) -> None:
        if sequence.status is Status.PREEMPTED:
            return
        self.batches.started()
        sequence.first_scheduled_step = step
        sequence.num_cached_tokens = min(sequence.num_scheduled_tokens, sequence.num_prompt_tokens)
        self._tally.cached_tokens += sequence.num_cached_tokens
        if self._limits.enable_prefix_caching:
            self._tally.prefix_cache_queries += sequence.num_tokens
            self._tally.prefix_cache_hits += sequence.num_scheduled_tokens

    # --- shared -------------------------------------------------------------------------------------------------------

    def _close(self, draft: _Draft) -> StepPlan:
        if not draft.scheduled:
            return StepPlan(draft.step)
        for sequence in draft.joined:
            sequence.move_to(Status.RUNNING)
            insort(self.running, sequence, key=_AGE)
        self._tally.step = draft.step
        if draft.joined:
            self._delay.joined(draft.step, draft.now_s)
        if draft.num_tokens == len(draft.scheduled) + draft.num_guesses:
            self._payoff.planned(draft.step, draft.now_s, len(draft.scheduled), draft.num_guesses)
        swap_out, swap_in = self._swap.announce()
        return StepPlan(
            step=draft.step,
            freed_rows=self.rows.announce(),
            new=tuple(map(_joining, draft.joined)),
            scheduled=tuple(draft.scheduled),
            swap_out=swap_out,
            swap_in=swap_in,
            copies=tuple(draft.copies),
            num_tokens=draft.num_tokens,
        )

    def _leave_running(self, sequence: Sequence) -> None:
        index = bisect_left(self.running, sequence.age, key=_AGE)
        assert self.running[index] is sequence, f"{sequence.sequence_id} is not among the running sequences"
        del self.running[index]

    def _release_unless_in_flight(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            return
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_published_blocks = 0
        self.rows.give_back(sequence)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _joining(sequence: Sequence) -> NewSequence:
    return NewSequence(
        row=sequence.row,
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.tokens),
        num_prompt_tokens=sequence.num_prompt_tokens,
        block_ids=tuple(sequence.block_table),
        params=sequence.params,
    )
