"""The core's interface: accepts sequences, returns step plans, applies the results of plans, returns outcomes.

    core.add(spec)                    queue a sequence
    core.fork(sequence_id, spec)      queue a sequence that shares the computed tokens of another
    core.abort(sequence_id)           end a sequence, at any time
    plan = core.schedule()            plan the next step
    outcomes = core.apply(plan, r)    apply the worker's result of a plan

`scheduler` decides the order, `residency` gives out rows and blocks; the caller runs the plans. The step loop calls the
core from one thread. Only `counters` may be called from another thread.
"""

import math
import struct
from copy import copy
from dataclasses import replace

import msgspec

from antiphon.services.engine.core.beams.beam_group import BeamGroups, further_beams
from antiphon.services.engine.core.drafts.drafter import Drafter, make_drafter
from antiphon.services.engine.core.drafts.expected import ExpectedTokens
from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.kv.kv_transfer import KvLoaded, KvReleased, KvTransfers
from antiphon.services.engine.core.kv.prefix_cache import PrefixCache
from antiphon.services.engine.core.kv.state_pieces import StatePieces
from antiphon.services.engine.core.kv.states import StatePool
from antiphon.services.engine.core.kv.swap import SwapSpace
from antiphon.services.engine.core.kv.tier import KvTier
from antiphon.services.engine.core.kv.windows import Windows
from antiphon.services.engine.core.plan import (
    CoreLimits,
    EngineFacts,
    SampledLogprobs,
    StepPlan,
    StepResult,
    prompt_logprob_rows,
)
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.services.engine.core.residency import Residency
from antiphon.services.engine.core.scheduler import Scheduler
from antiphon.services.engine.core.sequence import Sequence, Status, from_spec
from antiphon.services.engine.core.spec_checks import SpecChecks
from antiphon.services.engine.core.stopping import Verdict, rules_for
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineCounters, EngineLoad, PromptLogprobs

CANARY_PRIORITY = -(2**64)
"""Priority of the engine's own test sequence (`SequenceSpec.canary`): before every priority of a request."""


class Core:
    """The state of all sequences of an engine. Has no state of the model."""

    def __init__(self, limits: CoreLimits, facts: EngineFacts, tally: EngineCounters | None = None) -> None:
        """`tally`: the counters of an earlier core, which go on; None: they begin at 0."""
        assert min(limits.max_num_seqs, limits.max_num_batched_tokens, facts.num_blocks, facts.block_size) > 0
        self.facts = facts
        self.tally = tally or EngineCounters()
        self.pool = BlockPool(facts.num_blocks)
        caching = limits.enable_prefix_caching
        self.states = StatePool(facts.num_states, facts.state_interval, facts.block_size, self.pool, caching=caching)
        self.windows = Windows(facts.paging, self.pool)
        assert not (self.states and self.windows), "a model with recurrent states and windowed groups"
        self.prefix_cache = PrefixCache(self.pool, facts.block_size, self.states, self.windows, enabled=caching)
        self.swap = SwapSpace(facts.num_host_blocks, facts.block_size, self.pool, self.windows, self.tally)
        parts = (self.pool, self.prefix_cache, self.swap, self.states, self.windows, self.tally)
        self.residency = Residency(limits, facts.block_size, *parts)
        num_prompt_logprobs = prompt_logprob_rows(facts.vocab_size)
        self.scheduler = Scheduler(limits, facts, self.residency, self.tally, num_prompt_logprobs)
        pieces = StatePieces(self.states, facts.state_pieces, facts.num_blocks, facts.num_host_blocks)
        moved = (self.pool, self.swap, self.prefix_cache, pieces, self.windows, self.tally)
        self.transfers = KvTransfers(facts.block_size, *moved)
        self.tier = KvTier(facts.block_size, self.prefix_cache, self.windows, self.transfers, self.tally)
        self.groups: dict[tuple[str, bytes], list[Sequence]] = {}
        """The live members of each sequence group (sequences with a common prefix), by its name and cache salt."""
        self.beam_groups = BeamGroups(facts.block_size, facts.vocab_size)
        self.sequences: dict[str, Sequence] = {}
        """The live sequences (added and not ended), by sequence id. For those of a beam search the scheduler computes
        other sequences, the beams (see `beam_group`)."""
        self.canary_outcomes: list[Outcome] = []
        """Outcomes of the canary. The caller of `apply` clears the list."""
        self.failed: list[tuple[str, ServiceError]] = []
        """Sequences that ended because no token could be sampled for them. The caller of `apply` clears the list."""
        self.checks = SpecChecks(limits, facts)
        self.num_speculative_tokens, self._looks_up = limits.num_speculative_tokens, limits.use_lookahead
        self._num_added = 0
        self._num_applied = self.states.num_applied = self.tally.step

    def __contains__(self, sequence_id: str) -> bool:
        """Whether the sequence is live: from `add` until its outcome has a finish reason or until `abort`."""
        return sequence_id in self.sequences

    def add(self, spec: SequenceSpec) -> None:
        """Queues a sequence, or adds it to the beam search of its siblings.

        Raises ServiceError ('invalid_value', 'context_length_exceeded') for a sequence that could never run. The id
        must not be in use (AssertionError); the id of an aborted sequence may be used again at once.
        """
        assert spec.sequence_id not in self.sequences, f"{spec.sequence_id} was added twice"
        if spec.pooling is not None:
            kind = spec.pooling.kind or self.facts.pooling_kind
            spec = replace(spec, pooling=msgspec.structs.replace(spec.pooling, kind=kind))
        self.checks.check(spec)
        rules = rules_for(spec.params, spec.num_prompt_tokens, self.checks.max_model_len, self.facts.eos_token_ids)
        if spec.params.beam is not None:
            self.checks.check_beams(spec, rules)
        sequence = from_spec(spec, rules, self._num_added, self.facts.block_size, self.facts.vocab_size)
        # An expected output is drafted after known tokens only, so a step planned ahead would compute one token.
        sequence.waits_for_tokens = self.facts.num_stages > 1 or bool(spec.expected_token_ids)
        sequence.whole_images = self.facts.mutual_images
        self.sequences[spec.sequence_id] = sequence
        if spec.params.beam is not None:
            self._join_beam_group(sequence, spec)
            return
        if self.num_speculative_tokens and spec.pooling is None and not spec.canary:
            most, expected = self.num_speculative_tokens, spec.expected_token_ids
            if expected:
                sequence.drafter = Drafter(None, ExpectedTokens(expected, spec.num_prompt_tokens, most))
            else:
                sequence.drafter = make_drafter(most, predicts=self.facts.has_draft_layer, looks_up=self._looks_up)
        self._num_added += 1
        if spec.canary:
            # This makes it the oldest sequence of all: it is scheduled first once it runs, and preempted last.
            sequence.age = (CANARY_PRIORITY, 0, sequence.age[-1])
        if spec.sequence_group:
            sequence.siblings = self.groups.setdefault((spec.sequence_group, spec.cache_salt), [])
            sequence.siblings.append(sequence)
        if spec.kv_transfer_id:
            self.transfers.open(sequence)
        if spec.kv_source is not None and self.transfers.begin(sequence, spec.kv_source):
            sequence.move_to(Status.WAITING_FOR_KV)
            return
        if spec.kv_source is None and self.tier.load(sequence):
            sequence.move_to(Status.WAITING_FOR_KV)
            return
        self.scheduler.add(sequence)

    def fork(self, source_id: str, spec: SequenceSpec) -> None:
        """Queues a sequence that has a prefix in common with a live one (the source), for a further choice.

        If the source is running when the new sequence joins, the new one reuses the source's KV of the common prefix
        (see `reuse`): full blocks are shared, a partly filled last block is copied. Otherwise the new sequence is an
        ordinary one. Raises the same errors as `add`. The source must be live and have the same cache salt, and `spec`
        must have no sequence group. Neither may belong to a beam search.
        """
        source = self.sequences[source_id]
        assert source.params.beam is None, "the source has no tokens of its own"
        assert spec.params.beam is None, "a fork into a beam search"
        assert source.cache_salt == spec.cache_salt, "a fork across cache salts"
        assert not spec.sequence_group, "a fork has its source"
        self.add(spec)
        self.sequences[spec.sequence_id].siblings = [source]

    def abort(self, sequence_id: str) -> bool:
        """Ends a sequence without an outcome. Returns False if no live sequence has this id.

        If a plan in flight contains the sequence, its blocks and row are freed when that plan is applied, and the
        plan's result for it is ignored.
        """
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        self._leave(sequence)
        return True

    def transferred(self, result: KvLoaded | KvReleased) -> None:
        """Applies an event of a KV transfer: a load has ended, or saved blocks are no longer used."""
        if isinstance(result, KvReleased):
            self.transfers.released(result)
            return
        if result.took_s:
            self.tier.loaded(result)
        for sequence in self.transfers.finished(result):
            sequence.move_to(Status.WAITING)
            self.scheduler.add(sequence)

    def schedule(self, now_s: float = 0.0, *, urgent_canary: bool = False) -> StepPlan:
        """Plans the next step. The plan is empty if there is nothing to compute; an empty plan must not be run.

        `now_s` is the caller's clock in seconds, 0 if there is none. It is used for the scheduler delay (`delay`), for
        gathering batches (`batching`), for the idle lane and for deciding whether to draft tokens (`speculation`).
        `urgent_canary`: whether a waiting canary joins before all others are scheduled.

        Every plan that is not empty must be run and applied, in order. The next step may be planned before the earlier
        plans are applied. It then leaves out sequences with draft tokens in flight, because the tokens after the drafts
        depend on the result; with several pipeline stages, it also leaves out sequences whose next token is sampled by
        a plan in flight.
        """
        plan = self.scheduler.schedule(now_s, urgent_canary=urgent_canary)
        if self.tier.stored is not None and not plan.empty:
            self.tier.pace.planned(now_s)
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now_s: float = 0.0) -> list[Outcome]:
        """Applies a step's result. Returns one outcome for each live sequence with tokens or a vector, in plan order.

        The sequences of a beam search have an outcome only when the search is over, with all their tokens.

        A sequence whose outcome has a finish reason has ended. Its row and blocks are free, or, if a later plan in
        flight contains the sequence, will be free when that plan is applied.
        """
        if plan.empty:
            return []
        assert plan.step == result.step == self._num_applied + 1, (plan.step, result.step, self._num_applied)
        self._step_ended(plan, result, now_s)
        num_samples = sum(share.samples for share in plan.scheduled)
        assert len(result.token_ids) == len(result.logprobs) == num_samples, "the result is not that of the plan"
        samples = zip(result.token_ids, result.logprobs, strict=True)
        prompt_logprobs = iter(result.prompt_logprobs)
        assert len(result.vectors) == sum(share.pools for share in plan.scheduled), "the result is not that of the plan"
        vectors = iter(result.vectors)
        outcomes: list[Outcome] = []
        errors, index = dict(result.failed), -1
        for share in plan.scheduled:
            sampled = next(samples) if share.samples else None
            index += share.samples
            reported = next(prompt_logprobs) if share.num_prompt_logprobs else None
            vector = next(vectors) if share.pools else None
            sequence = self.residency.apply_result(share, len(sampled[0]) if sampled is not None else 0)
            if sequence.status is Status.FINISHED:
                continue
            self.prefix_cache.publish(sequence)
            if sequence.kv_transfer_id:
                self.transfers.save(sequence)
            self.tier.store(sequence)
            self.windows.pass_by(sequence)
            if reported is not None:
                sequence.prompt_logprobs.append(reported)
                sequence.has_prompt_logprobs = sequence.num_computed_tokens >= sequence.num_prompt_tokens - 1
            if vector is not None:
                (self.canary_outcomes if sequence.canary else outcomes).append(self._take_vector(sequence, vector))
            elif sampled is None:
                continue
            elif index in errors:
                self._fail(sequence, errors[index])
            elif not sampled[0]:
                assert sequence.num_in_flight == 0, f"{sequence.sequence_id} waits and was planned ahead"
            elif sequence.beams:
                outcomes += self._take_candidates(sequence, sampled[1][0])
            else:
                outcome = self._take_tokens(sequence, *sampled)
                (self.canary_outcomes if sequence.canary else outcomes).append(outcome)
                if share.num_drafts > 0 and sequence.drafter is not None and sequence.drafter.predicted is not None:
                    drafts = result.draft_token_ids[index] if result.draft_token_ids else ()
                    sequence.drafter.predicted.take(drafts, sequence.num_tokens)
        return outcomes

    def _step_ended(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        self._num_applied = self.states.num_applied = plan.step
        num_accepted = sum(max(0, len(given) - 1) for given in result.token_ids)
        if self.tier.stored is not None:
            self.tier.pace.applied(plan.num_tokens, now_s)
        self.scheduler.step_ended(plan.step, now_s, num_accepted, result.draft_s)

    def scheduled_ids(self, plan: StepPlan) -> list[str]:
        """Returns the id of each scheduled sequence of a plan, in plan order. The plan must not have been applied.

        The id of the canary is given as "".
        """
        rows = self.residency.rows
        return ["" if rows[share.row].canary else rows[share.row].sequence_id for share in plan.scheduled]

    def num_canary_tokens(self, plan: StepPlan) -> int:
        """Returns how many of a plan's tokens belong to the canary."""
        return sum(share.num_tokens for share in plan.scheduled if share.row >= len(self.residency.rows))

    def take_preempted(self) -> tuple[str, ...]:
        """Returns the ids of the sequences preempted since the last call."""
        found = tuple(self.residency.preempted)
        self.residency.preempted.clear()
        return found

    def joined(self, plan: StepPlan) -> tuple[str, ...]:
        """Returns the ids of the sequences that join in a plan, which must not have been applied yet.

        The canary is left out.
        """
        found: list[str] = []
        for new in plan.new:
            if new.params.beam is not None:
                found += self.beam_groups.joined(new)
            elif new.row < len(self.residency.rows):
                found.append(new.sequence_id)
        return tuple(found)

    def scheduled_sequences(self) -> list[Sequence]:
        """Returns the sequences that the scheduler has: the live ones, with a search's beams instead of its members.

        Sequences that wait for the KV of another engine are not among them.
        """
        own = [one for one in self.sequences.values() if one.params.beam is None]
        own = [one for one in own if one.status is not Status.WAITING_FOR_KV]
        return own + [beam for group in self.beam_groups for beam in group.beams]

    def load(self) -> EngineLoad:
        """Returns the current load. May be called from any thread."""
        residency, idle = self.residency, self.residency.yielding.queue
        return EngineLoad(
            num_free_blocks=self.pool.num_free,
            num_running=residency.num_running,
            num_waiting=residency.num_waiting + self.transfers.num_waiting,
            num_idle_running=len(residency.running) - residency.num_ordinary,
            num_idle_waiting=idle.num_waiting,
            num_waiting_tokens=residency.waiting.num_tokens + idle.num_tokens,
            num_idle_waiting_tokens=idle.num_tokens,
        )

    def counters(self) -> EngineCounters:
        """Returns a copy of the counters. May be called from any thread."""
        return copy(self.tally)

    # --- results ------------------------------------------------------------------------------------------------------

    def _take_tokens(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[SampledLogprobs, ...]
    ) -> Outcome:
        # A later plan in flight that contains the sequence was made for exactly one new token.
        assert len(token_ids) == 1 or sequence.num_in_flight == 0, f"{sequence.sequence_id} was planned ahead"
        position = sequence.num_output_tokens
        verdict = _append(sequence, token_ids)
        count = sequence.num_output_tokens - position
        if count < len(token_ids):
            token_ids, logprobs = token_ids[:count], logprobs[:count]
        for entry in logprobs:
            sequence.cumulative_logprob += entry.logprob
        self._count(sequence, position, count)
        if verdict is not None:
            self._end(sequence)
        return Outcome(
            sequence_id=sequence.sequence_id,
            position=position,
            token_ids=token_ids,
            logprobs=logprobs if sequence.params.logprobs is not None else (),
            cumulative_logprob=sequence.cumulative_logprob,
            finish_reason=verdict.reason if verdict else None,
            stop_token_id=verdict.stop_token_id if verdict else None,
            num_cached_tokens=sequence.num_cached_tokens,
            first_scheduled_step=sequence.first_scheduled_step,
            prompt_logprobs=_prompt_logprobs(sequence) if position == sequence.num_carried_tokens else (),
            kv_origin=sequence.kv_origin if position == sequence.num_carried_tokens else None,
        )

    def _take_candidates(self, beam: Sequence, candidates: SampledLogprobs) -> list[Outcome]:
        """Passes the candidates of a beam to its search. Returns the outcomes of its members if the search is over."""
        group = self.beam_groups.group_of(beam)
        sources = group.report(beam, candidates)
        if sources is None:
            return []
        if not group.search.over:
            if len(group.beams) < len(sources):
                self.residency.spread(group.beams, further_beams(group))
            self.residency.rearrange(group.beams, sources, group.new_tokens())
            return []
        outcomes = group.outcomes()
        for member, outcome in zip(list(group.members), outcomes, strict=True):
            assert outcome.finish_reason is not None
            self._count(member, outcome.position, len(outcome.token_ids))
            self._end(member)
        return outcomes

    def _take_vector(self, sequence: Sequence, vector: bytes) -> Outcome:
        self._count(sequence, 0, 0)
        self._end(sequence)
        return Outcome(
            sequence_id=sequence.sequence_id,
            position=0,
            token_ids=(),
            finish_reason="stop",
            num_cached_tokens=sequence.num_cached_tokens,
            first_scheduled_step=sequence.first_scheduled_step,
            vector=vector,
            kv_origin=sequence.kv_origin,
        )

    def _count(self, sequence: Sequence, position: int, num_tokens: int) -> None:
        if sequence.canary:
            return
        self.tally.generation_tokens += num_tokens
        if position == sequence.num_carried_tokens:
            self.tally.prompt_tokens += sequence.num_prompt_tokens - sequence.num_virtual_tokens

    def _end(self, sequence: Sequence) -> None:
        del self.sequences[sequence.sequence_id]
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Removes an ended sequence from the scheduler, or from its beam search, which ends with its last member."""
        if sequence.params.beam is not None:
            group = self.beam_groups.leave(sequence)
            for beam in list(group.beams) if group is not None else ():
                self.scheduler.finish(beam)
            return
        self._leave_group(sequence)
        if sequence.kv_transfer_id:
            self.transfers.end(sequence)
        if sequence.status is Status.WAITING_FOR_KV:
            self.transfers.abandon(sequence)
            sequence.move_to(Status.FINISHED)
            return
        self.scheduler.finish(sequence)

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._end(sequence)
        if sequence.canary:
            position = sequence.num_output_tokens
            self.canary_outcomes.append(
                Outcome(sequence_id=sequence.sequence_id, position=position, token_ids=(), finish_reason="error")
            )
            return
        self.failed.append((sequence.sequence_id, ServiceError("invalid_value", message)))

    def _leave_group(self, sequence: Sequence) -> None:
        if not sequence.sequence_group:
            return
        members = self.groups[sequence.sequence_group, sequence.cache_salt]
        members.remove(sequence)
        if not members:
            del self.groups[sequence.sequence_group, sequence.cache_salt]

    def _join_beam_group(self, member: Sequence, spec: SequenceSpec) -> None:
        assert spec.params.beam is not None
        group = self.beam_groups.join(member, spec, self._num_added)
        if group is not None:
            self._num_added += spec.params.beam.width
            self.scheduler.add(group.leader)


def _prompt_logprobs(sequence: Sequence) -> tuple[PromptLogprobs, ...]:
    """Returns the log probabilities of the prompt, if the sequence asked for them, and removes them from it."""
    if sequence.params.prompt_logprobs is None:
        return ()
    first = PromptLogprobs(
        start=0, token_ids=pack_ids(sequence.tokens[:1]), logprobs=struct.pack("<f", math.nan), ranks=pack_ids((0,))
    )
    reported = (first, *sequence.prompt_logprobs)
    sequence.prompt_logprobs.clear()
    return reported


def _append(sequence: Sequence, token_ids: tuple[int, ...]) -> Verdict | None:
    """Appends sampled tokens up to the first that ends the sequence. Returns the verdict; None if it continues."""
    assert token_ids, f"nothing was sampled for {sequence.sequence_id}"
    for position, token_id in enumerate(token_ids, sequence.num_output_tokens):
        sequence.tokens.append(token_id)
        if verdict := sequence.rules.verdict(token_id, position):
            return verdict
    return None
