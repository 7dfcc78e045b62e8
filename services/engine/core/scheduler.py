"""The scheduling policy: which sequences compute which tokens in the next step.

There is no prefill phase and no decode phase. Each sequence has a number of known tokens and a number of scheduled
tokens, and each step schedules some of the tokens that are known but not scheduled, as many as one token budget allows.
This covers chunked prefill, prefix hits, preemption and resumption. Running sequences are scheduled first, oldest
first; then waiting sequences join (get a row of the worker's batch) in queue order while there are rows, KV blocks and
budget. No waiting sequence overtakes the head of the queue. If a running sequence finds no free block, the youngest
running sequence is preempted: its blocks are freed, it waits again, and later its KV is loaded from the host's memory
or recomputed (`swap`). The oldest sequence therefore always progresses.

Steps may be planned ahead: `schedule` treats plans in flight as if they had been applied, and the worker takes tokens
that the core does not know yet from its own row. A sequence's row and blocks are freed only when no plan in flight
contains the sequence. A sequence in flight is not preempted: the sequence that lacks blocks, and all younger ones, are
left out of the plan instead. When a plan is applied, its effect on a sequence is read from the plan itself, so the
scheduler keeps no record of earlier plans.

With several pipeline stages, plans in flight are computed at the same time, so they have different sequences: a plan
leaves out sequences whose next token is sampled by a plan in flight, and takes an equal part of the decoding sequences
(`step_draft.part_of`), oldest first. Chunks of one prompt may be in successive plans, as each stage computes the plans
in order.

The beams of a beam search (`beam_group`) are scheduled like other sequences, but join and are preempted together: the
leader waits until there are rows for all of them, and a preempted search begins anew with its leader alone. For a
sequence with log probabilities of its prompt, the whole prompt is computed, in chunks whose logits have a bounded size.

The hidden sequence, with which the engine tests itself (`canary`), has a reserved row and does not queue. It joins when
a step has budget for its whole prompt, or before all others once it is `urgent`. It is not counted as a running
sequence. Other sequences may be preempted to get blocks for it, as for any older sequence.

Idle sequences (`idle_lane`) are scheduled after all others in each step, and the others may preempt them. Newcomers
(waiting sequences of a client with few running ones) may get a step without the running sequences (`newcomers`).

Not here: stop conditions and results (`core`), and the reuse of KV by joining sequences (`reuse`). Called by `core`.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from services.engine.core.beams.beam_group import rearrange
from services.engine.core.counters import Tally
from services.engine.core.kv.block_pool import BlockPool
from services.engine.core.kv.prefix_cache import PrefixCache
from services.engine.core.kv.reuse import Reusable, Shortage, find_reusable
from services.engine.core.kv.swap import SwapSpace
from services.engine.core.plan import CoreLimits, ScheduledSequence, StepPlan
from services.engine.core.policy.batching import BatchGate
from services.engine.core.policy.delay import AdmissionDelay
from services.engine.core.policy.drafting import judge, propose
from services.engine.core.policy.idle_lane import PROMPT_SHARE, IdleLane
from services.engine.core.policy.newcomers import NewcomerSteps
from services.engine.core.policy.prefill_shares import shares_of
from services.engine.core.policy.speculation import SpeculationController
from services.engine.core.policy.waiting import WaitingQueue
from services.engine.core.rows import RowTable
from services.engine.core.sequence import Sequence, Status
from services.engine.core.step_draft import StepDraft, joining, part_of
from shared.batch_rows import num_reserved_rows

_AGE = attrgetter("age")


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
        prompt_logprobs: int,
        num_stages: int = 1,
    ) -> None:
        """`prompt_logprobs`: maximum number of a step's prompt tokens with reported log probabilities.

        `num_stages`: see `EngineFacts`.
        """
        self._num_stages = num_stages
        self._prompt_logprobs = prompt_logprobs
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """In order of age, oldest first; the idle ones are last."""
        self.idle = IdleLane(self.running)
        self.rows = RowTable(
            limits.max_num_seqs, limits.max_loras, limits.max_prompt_adapters, has_hidden_row=limits.has_hidden_row
        )
        self.hidden: Sequence | None = None
        """The hidden sequence while it waits."""
        self.urgent = False
        """Whether the hidden sequence joins before all others are scheduled."""
        self._limits = limits
        self._block_size = block_size
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._swap = swap
        ratio = limits.kv_cache_ratio
        self._reserve = 0 if ratio is None else pool.num_blocks - int(ratio * pool.num_blocks)
        rows = limits.max_num_seqs
        self._reserved_rows = num_reserved_rows(rows)
        self._delay = AdmissionDelay(limits.scheduler_delay_factor)
        self.newcomers = NewcomerSteps()
        self._speculation = SpeculationController()
        self.batches = BatchGate(limits.max_batch_size, limits.batch_wait_timeout)
        self._tally = tally
        self.preempted: list[str] = []
        """Ids of the sequences preempted since the step loop last cleared the list."""
        self._shortage: Shortage | None = None
        self._head_went_first = False

    @property
    def num_rows(self) -> int:
        """Number of rows, free or held: the maximum number of running sequences."""
        return len(self.rows)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        if sequence.hidden:
            assert self.rows.has_hidden_row, "there is no row for a hidden sequence"
            assert self.hidden is None, "a hidden sequence waits already"
            self.hidden = sequence
        elif sequence.idle:
            self.idle.add(sequence)
        else:
            self.waiting.push(sequence)

    def is_hidden(self, row: int) -> bool:
        """Whether a row is the hidden sequence's."""
        return row >= len(self.rows)

    @property
    def num_running(self) -> int:
        """Number of running sequences, without the hidden one."""
        return len(self.running) - (bool(self.running) and self.running[0].hidden)

    @property
    def num_idle_running(self) -> int:
        """Number of running idle sequences."""
        return len(self.running) - self.idle.num_ordinary

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences, idle ones included."""
        return self.waiting.num_waiting + self.idle.queue.num_waiting

    def schedule(self, now_s: float) -> StepPlan:
        """Plans a step.

        An empty plan uses no step number, and freed rows and swap copies stay pending for the next plan.
        """
        self.idle.promote(now_s, self.waiting)
        self.idle.withheld = False
        proposers = self._speculation.num_proposers(len(self.running), now_s)
        budget = self._limits.step_tokens(len(self.running), proposers)
        room = part_of(len(self.running), self._num_stages) if self._num_stages > 1 else budget
        draft = StepDraft(self._tally.step + 1, budget, self._prompt_logprobs, now_s, room, proposers)
        may_join = self._may_join(now_s)
        if self.hidden is not None and self.urgent:
            self._schedule_hidden(draft)
        if may_join:
            self._schedule_large_head(draft)
        alone = may_join and self._schedule_newcomers(draft)
        fits = not alone and self._schedule_running(draft, self._prefill_shares(draft.budget, may_join))
        if fits and may_join:
            self._schedule_waiting(draft)
        if fits and not self.idle.withheld:
            self._schedule_idle(draft, budget)
        if self.hidden is not None and draft.budget >= self.hidden.num_tokens:
            self._schedule_hidden(draft)
        return self._close(draft)

    def step_ended(self, step: int, now_s: float, num_accepted: int) -> None:
        """Records that a step has ended, with `num_accepted` accepted draft tokens in all.

        The caller then calls `apply_result` for each sequence of the step.
        """
        self._delay.step_ended(step, now_s)
        self._speculation.step_ended(step, now_s, num_accepted)

    def apply_result(self, share: ScheduledSequence, num_given: int) -> Sequence:
        """Applies the result of one scheduled sequence of the oldest plan in flight.

        `num_given`: number of tokens that the sequence got. Returns the sequence. If it is finished and no other plan
        in flight contains it, its row and blocks are freed. Rejected draft tokens count as never scheduled; the blocks
        that were added for them stay in the block table for later tokens.
        """
        sequence = self.rows[share.row]
        sequence.num_in_flight -= 1
        assert sequence.num_computed_tokens == share.start, f"plans were applied out of order: {share}"
        num_draft_tokens = len(share.draft_token_ids)
        sequence.num_pending_tokens -= share.samples + num_draft_tokens
        num_wrong = 0
        if num_draft_tokens:
            num_wrong = judge(sequence, num_draft_tokens, num_given - 1, self._tally)
        sequence.num_scheduled_tokens -= num_wrong
        sequence.num_computed_tokens = share.start + share.num_tokens - num_wrong
        if sequence.status is Status.FINISHED:
            self._release_unless_in_flight(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its row and blocks.

        If plans in flight contain the sequence, its row and blocks are freed when the last of these plans is applied.
        """
        was_running = sequence.status is Status.RUNNING
        sequence.move_to(Status.FINISHED)
        if was_running and len(sequence.beams) == 1:
            self.rows.num_reserved -= sequence.num_rows - 1
        if was_running:
            self._leave_running(sequence)
            self._release_unless_in_flight(sequence)
        elif sequence.hidden:
            self.hidden = None
        else:
            self._queue_of(sequence).forget(sequence)
            self._swap.drop(sequence)

    def spread(self, beams: list[Sequence], further: list[Sequence]) -> None:
        """Adds the further beams of a search, whose leader has computed the prompt, in the rows reserved for them.

        The caller then calls `rearrange`.
        """
        for beam in further:
            self.rows.take_vacant(beam)
            beam.move_to(Status.RUNNING)
            self._queue_of(beam).count_running(beam)
            insort(self.running, beam, key=_AGE)
        beams += further

    def rearrange(self, beams: list[Sequence], sources: list[int], token_ids: list[int]) -> None:
        """Makes beam i continue beam `sources[i]` with `token_ids[i]`, see `beam_group.rearrange`."""
        rearrange(beams, sources, token_ids, self._pool, self._block_size)
        for beam in beams:
            self.rows.vacate(beam)

    # --- running sequences --------------------------------------------------------------------------------------------

    def _schedule_running(self, draft: StepDraft, shares: dict[str, int] | None, *, idle: bool = False) -> bool:
        """Schedules the running sequences, oldest first. Returns False if blocks ran out; then no sequence may join.

        `shares`: how many prompt tokens of each client to schedule, if they are divided. `idle`: whether to schedule
        the idle sequences or the ordinary ones.
        """
        num_running = len(self.running)
        index = self.idle.num_ordinary if idle else 0
        drafts_too = not idle or not index
        # Preemption removes sequences from the end of the list, so the index stays valid.
        while index < len(self.running) and draft.budget > 0 and self.running[index].idle == idle:
            sequence = self.running[index]
            num_tokens = draft.limited(sequence, min(sequence.num_unscheduled_tokens, draft.budget))
            if num_tokens == 1 and draft.room <= 0:
                num_tokens = 0
            if shares is not None and num_tokens > 1:
                num_tokens = min(num_tokens, shares[sequence.client])
                shares[sequence.client] -= num_tokens
            elif idle and num_tokens > 1:
                num_tokens = min(num_tokens, draft.idle_prompt_tokens)
                draft.idle_prompt_tokens -= num_tokens
            if (num_tokens := sequence.uncut(sequence.num_scheduled_tokens, num_tokens)) > 0:
                others = len(self.running) - index
                may_draft = draft.num_proposers and drafts_too
                draft_tokens = (
                    propose(sequence, draft.budget - others, self._pool, self._block_size, self._tally)
                    if may_draft
                    else ()
                )
                new_blocks = self._grow(sequence, num_tokens + len(draft_tokens))
                if new_blocks is None:
                    return False
                if self.rows.is_vacant(sequence.row):
                    self.rows.fill(sequence)
                    draft.refill(sequence)
                    new_blocks = ()
                draft.add(sequence, num_tokens, new_blocks, draft_tokens)
            index += 1
        return len(self.running) == num_running

    def _prefill_shares(self, budget: int, may_join: bool) -> dict[str, int] | None:
        """Returns how many prompt tokens of each client to schedule in a step; None if they need not be divided.

        A client that has nothing running and whose first waiting sequence can join has a share too.
        """
        newcomer = self.waiting.head(newcomers_only=True) if may_join and self._num_free_rows() else None
        if newcomer is not None and (not newcomer.client or self._cannot_join(newcomer)):
            newcomer = None
        if not self._limits.enable_chunked_prefill or self.waiting.num_running_clients + (newcomer is not None) < 2:
            return None
        return shares_of(self.running[: self.idle.num_ordinary], newcomer, budget)

    def _cannot_join(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is known to lack rows, blocks or an adapter slot."""
        is_short = self._shortage is not None and self._shortage.sequence is sequence
        return is_short or not self.rows.has_slots(sequence) or sequence.num_rows > self._num_free_rows()

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[int] | tuple[()] | None:
        """Extends the block table for the next `num_tokens`, preempting the youngest sequences if blocks are short.

        Returns the new blocks; None if there are not enough. Then the sequence itself was the youngest and has been
        preempted, or the youngest is in flight and cannot be preempted. In both cases no younger sequence may be
        scheduled in this step; otherwise this sequence could be passed over in every step.
        """
        count = self._blocks_for(sequence.num_scheduled_tokens + num_tokens) - len(sequence.block_table)
        if count <= 0:
            return ()
        while (new_blocks := self._pool.allocate(count)) is None:
            youngest = self.running[-1]
            together = youngest.beams or [youngest]
            if any(one.num_in_flight for one in together):
                return None
            gives_way = sequence in together
            self._preempt(youngest)
            if gives_way:
                return None
        sequence.block_table += new_blocks
        return new_blocks

    def _preempt(self, sequence: Sequence) -> None:
        """Preempts a sequence, or all beams of a search, which then begins anew."""
        if len(sequence.beams) > 1:
            sequence = self._drop_further_beams(sequence.beams)
        else:
            if sequence.reuses_kv:
                self._swap.store(sequence)
            if not sequence.has_prompt_logprobs:
                sequence.prompt_logprobs.clear()
            self.rows.num_reserved -= sequence.num_rows - 1
        sequence.move_to(Status.PREEMPTED)
        self._leave_running(sequence)
        self._release_unless_in_flight(sequence)
        sequence.start_at(0)
        self._queue_of(sequence).push(sequence)
        self._tally.preemptions += 1
        self._tally.idle_preemptions += sequence.idle
        self.preempted.append(sequence.sequence_id)

    def _drop_further_beams(self, beams: list[Sequence]) -> Sequence:
        """Ends all beams except the leader, which gets its prompt back as its only tokens. Returns the leader."""
        leader, *further = beams
        for beam in further:
            self.finish(beam)
        del beams[1:]
        del leader.tokens[leader.num_prompt_tokens :]
        del leader.block_hashes[leader.num_prompt_tokens // self._block_size :]
        leader.copied_block = None
        return leader

    # --- the hidden sequence ------------------------------------------------------------------------------------------

    def _schedule_hidden(self, draft: StepDraft) -> None:
        """Schedules the hidden sequence's prompt, if there are blocks for the whole sequence. It reuses no KV."""
        sequence = self.hidden
        assert sequence is not None
        num_all = sequence.num_prompt_tokens + sequence.rules.max_tokens
        blocks = self._pool.allocate(self._blocks_for(num_all)) if draft.budget > 0 else None
        if blocks is None:
            return
        self.hidden = None
        self.rows.take(sequence)
        sequence.block_table = blocks
        sequence.first_scheduled_step = draft.step
        draft.hidden.append(sequence)
        draft.add(sequence, min(sequence.num_tokens, draft.budget))

    # --- waiting sequences --------------------------------------------------------------------------------------------

    def _may_join(self, now_s: float) -> bool:
        head = self.waiting.head()
        self.batches.look(head, self.waiting.num_waiting, now_s)
        if head is None or not self.batches.admits(head, 0):
            return False
        return self._delay.passed(now_s) or not self.idle.num_ordinary

    def _schedule_waiting(self, draft: StepDraft) -> None:
        num_waiting = min(self.waiting.num_waiting, self._num_free_rows())
        most = len(draft.joined) + part_of(num_waiting, self._num_stages)
        while len(draft.joined) < most and draft.budget > 0 and (sequence := self._next_to_join()):
            if not self.batches.admits(sequence, len(draft.joined)) or not draft.limited(sequence, 1):
                return
            alone = not self.idle.num_ordinary and not draft.joined
            if (found := self._fit(sequence, draft.budget, 0 if alone else self._reserve)) is None:
                return
            self._join(sequence, found, draft)

    def _schedule_newcomers(self, draft: StepDraft) -> bool:
        """Schedules newcomers in a step without the running sequences (`NewcomerSteps`). Returns whether it did."""
        others, newcomers = self.running[: self.idle.num_ordinary], self.newcomers
        chunked = self._limits.enable_chunked_prefill
        if not chunked or not newcomers.may_go_first(draft.step, self.waiting, others):
            return False
        while True:
            few_may = self._num_free_rows() > self._reserved_rows
            head = newcomers.next(self.waiting, others, draft.num_tokens, few_may=few_may)
            if head is None or self._cannot_join(head):
                break
            if not self.batches.admits(head, len(draft.joined)) or not draft.limited(head, 1):
                break
            if (found := self._fit(head, draft.budget, self._reserve)) is None:
                break
            newcomers.went_first(draft.step)
            self._join(head, found, draft)
        return bool(draft.joined)

    def _next_to_join(self) -> Sequence | None:
        """Returns the waiting sequence that joins next if it fits; None if there is no row for any.

        Rows of idle sequences count as free, because `_fit` can preempt these.

        The last rows are reserved for clients without a running sequence, which would otherwise have to wait until a
        sequence of another client ends. Sequences without a client may use all rows, and so may a beam search, which
        waits until there are rows for all its beams. A sequence whose adapter has no slot waits until no running
        sequence uses one of the slots.
        """
        num_free = self._num_free_rows()
        head = self.waiting.head(newcomers_only=num_free <= self._reserved_rows) if num_free else None
        fits = head is not None and head.num_rows <= num_free and (self.rows.has_slots(head) or self.idle.holds_slots)
        return head if fits else None

    def _schedule_large_head(self, draft: StepDraft) -> None:
        """Without chunked prefill: schedules the head of the queue before the running sequences if necessary.

        The prompt may be longer than the budget that the running sequences leave, or than the whole budget; in the
        latter case the head runs alone. This happens at most in every other step while sequences run, so that they
        progress too, and only if none of them would have to be preempted for it.
        """
        num_others = self.idle.num_ordinary
        went_first, self._head_went_first = self._head_went_first and num_others > 0, False
        head = None if self._limits.enable_chunked_prefill or went_first else self._next_to_join()
        if head is None or head.num_tokens + num_others <= draft.budget:
            return
        tokens, blocks = self.idle.demand_of_others(self._block_size)
        spare = blocks + (self._reserve if num_others else 0)
        found = self._fit(head, max(draft.budget, head.num_tokens), spare)
        if found is None or head.num_tokens - found.num_tokens + tokens <= draft.budget:
            return
        self._join(head, found, draft)
        self._head_went_first = True

    def _reusable_of_fitting(self, sequence: Sequence, budget: int, spare_blocks: int) -> Reusable | None:
        """Returns the reusable KV of a waiting sequence; None if the sequence does not fit now.

        A sequence fits if there are blocks for all its known tokens with `spare_blocks` left free, and if the budget
        has room for all tokens to compute (with chunked prefill: for one token). All known tokens need blocks even if
        only part of them is scheduled now, because a prefill that is preempted half-way is wasted. Also returns None if
        the sequence would have much less to compute in the next step (`Reusable.worth_waiting`).
        """
        num_free = self._pool.num_free - spare_blocks
        known = self._shortage
        if known is not None and known.sequence is sequence and known.goes_on(num_free, budget, self._pool):
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
        self._shortage = Shortage(sequence, num_blocks, num_tokens, first_miss)
        return None

    def _join(self, head: Sequence, found: Reusable, draft: StepDraft) -> None:
        """Gives the head of the queue a row and blocks and schedules its tokens (chunked prefill: up to the budget)."""
        self._shortage = None
        self._queue_of(head).pop(head, head.num_tokens - found.num_tokens)
        start, num_shared = found.num_tokens, len(found.shared)
        num_tokens = head.num_tokens - start
        if self._limits.enable_chunked_prefill:
            num_tokens = min(num_tokens, draft.budget, draft.idle_prompt_tokens if head.idle else draft.budget)
        num_tokens = head.uncut(start, draft.limited(head, num_tokens))
        draft.idle_prompt_tokens -= num_tokens if head.idle else 0
        self._pool.share(found.shared)
        new_blocks = self._pool.allocate(self._blocks_for(start + num_tokens) - num_shared)
        assert new_blocks is not None, "a sequence that fits found no blocks"
        self.rows.take(head)
        self.rows.num_reserved += head.num_rows - 1
        head.block_table = found.shared + new_blocks
        head.num_published_blocks = num_shared
        if found.copied is not None:
            draft.copies.append((found.copied, new_blocks[0]))
        if found.from_host:
            self._swap.bring_back(head, first=num_shared)
        else:
            self._swap.drop(head)
        head.start_at(start)
        self._note_first_run(head, draft.step, num_shared * self._block_size if found.from_host else start)
        draft.joined.append(head)
        draft.add(head, num_tokens)

    def _note_first_run(self, sequence: Sequence, step: int, num_found: int) -> None:
        """Records a sequence's first run. `num_found`: cached tokens except those that another engine has sent."""
        if sequence.status is Status.PREEMPTED:
            return
        if not sequence.idle:
            self.batches.started()
        sequence.first_scheduled_step = step
        cached = min(num_found, sequence.num_prompt_tokens)
        sequence.num_cached_tokens = max(0, cached - sequence.num_virtual_tokens)
        self._tally.cached_tokens += sequence.num_cached_tokens
        if self._limits.enable_prefix_caching and sequence.reuses_kv:
            self._tally.prefix_cache_queries += sequence.num_tokens
            self._tally.prefix_cache_hits += num_found

    # --- idle sequences -----------------------------------------------------------------------------------------------

    def _schedule_idle(self, draft: StepDraft, budget: int) -> None:
        """Schedules the idle sequences with the rest of a step of `budget` tokens; further idle sequences may join."""
        if not self.num_idle_running and not self.idle.queue.num_waiting:
            return
        chunked = self._limits.enable_chunked_prefill
        divided = chunked and (self.idle.num_ordinary or draft.scheduled)
        draft.idle_prompt_tokens = max(1, budget // PROMPT_SHARE) if divided else draft.budget
        if not self._schedule_running(draft, None, idle=True) or self.waiting.num_waiting:
            return
        queue, num_free = self.idle.queue, self.rows.num_free
        last = len(draft.joined) + part_of(min(queue.num_waiting, num_free), self._num_stages)
        while len(draft.joined) < last and min(draft.budget, draft.idle_prompt_tokens) > 0 and (head := queue.head()):
            if head.num_rows > self.rows.num_free or not self.rows.has_slots(head) or not draft.limited(head, 1):
                return
            most = min(draft.budget, draft.idle_prompt_tokens) if draft.scheduled or chunked else head.num_tokens
            alone = not self.running and not draft.scheduled
            if (found := self._reusable_of_fitting(head, most, 0 if alone else self._reserve)) is None:
                return
            self._join(head, found, draft)

    def _fit(self, head: Sequence, budget: int, spare_blocks: int) -> Reusable | None:
        """Like `_reusable_of_fitting`, but first preempts idle sequences whose rows or blocks `head` needs."""
        while self.rows.num_free < head.num_rows or not self.rows.has_slots(head):
            if not self._displace(for_a_slot=self.rows.num_free >= head.num_rows):
                return None
        while (found := self._reusable_of_fitting(head, budget, spare_blocks)) is None:
            short = self._shortage
            num_free = self._pool.num_free - spare_blocks
            if short is None or short.sequence is not head or short.num_tokens > budget or short.num_blocks <= num_free:
                return None
            if short.num_blocks > num_free + self.idle.num_blocks(self._pool) or not self._displace():
                return None
        return found

    def _displace(self, *, for_a_slot: bool = False) -> bool:
        """Preempts an idle sequence. If all are in flight, returns False; then this plan leaves them out."""
        if (sequence := self.idle.to_preempt(for_a_slot=for_a_slot)) is not None:
            self._preempt(sequence)
        else:
            self.idle.withheld = self.num_idle_running > 0
        return sequence is not None

    def _num_free_rows(self) -> int:
        """Returns the number of rows that are free for sequences that are not idle."""
        return self.rows.num_free + self.idle.num_rows

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self.idle.queue if sequence.idle else self.waiting

    # --- shared -------------------------------------------------------------------------------------------------------

    def _close(self, draft: StepDraft) -> StepPlan:
        if not draft.scheduled:
            return StepPlan(draft.step)
        for sequence in [*draft.joined, *draft.hidden]:
            sequence.move_to(Status.RUNNING)
            insort(self.running, sequence, key=_AGE)
        self._tally.step = draft.step
        if any(not sequence.idle for sequence in draft.joined):
            self._delay.joined(draft.step, draft.now_s)
        if draft.num_tokens == len(draft.scheduled) + draft.num_draft_tokens:
            self._speculation.planned(draft.step, draft.now_s, len(draft.scheduled), draft.num_draft_tokens)
        swap_out, swap_in = self._swap.announce()
        return StepPlan(
            step=draft.step,
            freed_rows=self.rows.announce(),
            new=tuple(map(joining, [*draft.joined, *draft.hidden, *draft.refilled])),
            scheduled=tuple(draft.scheduled),
            swap_out=swap_out,
            swap_in=swap_in,
            copies=tuple(draft.copies),
            num_tokens=draft.num_tokens,
            num_prompt_logprobs=self._prompt_logprobs - draft.prompt_logprobs,
            adapters=self.rows.adapters.announce(),
        )

    def _leave_running(self, sequence: Sequence) -> None:
        index = bisect_left(self.running, sequence.age, key=_AGE)
        assert self.running[index] is sequence, f"{sequence.sequence_id} is not among the running sequences"
        del self.running[index]
        if not sequence.hidden:
            self._queue_of(sequence).stopped(sequence)

    def _release_unless_in_flight(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            return
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_published_blocks = 0
        self.rows.give_back(sequence)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
