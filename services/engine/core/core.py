"""The core's interface: takes sequences, returns step plans, takes the results of plans, returns outcomes.

    core.add(spec)                    queue a sequence
    core.fork(sequence_id, spec)      queue a sequence that shares the computed tokens of another
    core.abort(sequence_id)           end a sequence, at any time
    plan = core.schedule()            plan the next step
    outcomes = core.apply(plan, r)    apply the worker's result of a plan

The scheduling order and the memory are decided in `scheduler` and `block_pool`; plans are run by the caller. The step
loop calls the core from one thread. Only `counters` may be called from another thread.
"""

from dataclasses import replace

import msgspec

from services.engine.core.block_pool import BlockPool
from services.engine.core.counters import Counters, Tally
from services.engine.core.lookahead import Lookahead
from services.engine.core.plan import CoreLimits, EngineFacts, SampledLogprobs, StepPlan, StepResult
from services.engine.core.prefix_cache import PrefixCache
from services.engine.core.request import Outcome, SequenceSpec
from services.engine.core.scheduler import Scheduler
from services.engine.core.sequence import Sequence, Status, from_spec
from services.engine.core.stopping import Verdict, rules_for
from services.engine.core.swap import SwapSpace
from shared.blocks import HASH_BYTES
from shared.errors import ServiceError
from shared.pooling import PoolingParams
from shared.pooling import check as check_pooling


class Core:
    """The state of all sequences of an engine. Holds no state of the model."""

    def __init__(self, limits: CoreLimits, facts: EngineFacts) -> None:
        assert min(limits.max_num_seqs, limits.max_num_batched_tokens, facts.num_blocks, facts.block_size) > 0
        self.facts = facts
        self.tally = Tally()
        self.pool = BlockPool(facts.num_blocks)
        self.prefix_cache = PrefixCache(self.pool, facts.block_size, enabled=limits.enable_prefix_caching)
        self.swap = SwapSpace(facts.num_host_blocks, facts.block_size, self.pool, self.tally)
        self.scheduler = Scheduler(limits, facts.block_size, self.pool, self.prefix_cache, self.swap, self.tally)
        self._families: dict[tuple[str, bytes], list[Sequence]] = {}
        """The live sequences of each family (sequences with a common prefix), by family name and cache salt."""
        self.sequences: dict[str, Sequence] = {}
        """The live sequences (added and not ended), by sequence id."""
        # The last token of a sequence is sampled but never computed, so it needs no slot in a KV block.
        self.max_model_len = min(facts.max_model_len, facts.num_blocks * facts.block_size + 1)
        """Maximum tokens of a sequence, prompt and output: the model's limit or the whole pool's capacity, if lower."""
        self.max_prompt_len = min(facts.max_model_len, facts.num_blocks * facts.block_size)
        """Maximum tokens of a pooling sequence, which has no output."""
        self.num_speculative_tokens = limits.num_speculative_tokens
        self._num_added = 0
        self._num_applied = 0

    def __contains__(self, sequence_id: str) -> bool:
        """Whether the sequence is live: from `add` until its outcome has a finish reason or until `abort`."""
        return sequence_id in self.sequences

    @property
    def num_families(self) -> int:
        """Number of families with a live member."""
        return len(self._families)

    def add(self, spec: SequenceSpec) -> None:
        """Queues a sequence.

        Raises ServiceError ('invalid_value', 'context_length_exceeded') for a sequence that could never run. The id
        must not be in use (AssertionError); the id of an aborted sequence may be used again at once.
        """
        assert spec.sequence_id not in self.sequences, f"{spec.sequence_id} was added twice"
        if spec.pooling is not None:
            kind = spec.pooling.kind or self.facts.pooling_kind
            spec = replace(spec, pooling=msgspec.structs.replace(spec.pooling, kind=kind))
        self._check(spec)
        rules = rules_for(spec.params, len(spec.prompt_token_ids), self.max_model_len, self.facts.eos_token_ids)
        sequence = from_spec(spec, rules, self._num_added, self.facts.block_size)
        if self.num_speculative_tokens and spec.pooling is None:
            sequence.lookahead = Lookahead(self.num_speculative_tokens)
        self._num_added += 1
        self.sequences[spec.sequence_id] = sequence
        if spec.family:
            sequence.relatives = self._families.setdefault((spec.family, spec.cache_salt), [])
            sequence.relatives.append(sequence)
        self.scheduler.add(sequence)

    def fork(self, source_id: str, spec: SequenceSpec) -> None:
        """Queues a sequence that has a prefix in common with a live one (the source), for a further choice or a beam.

        If the source is running when the new sequence joins, the new one reuses the source's KV of the common prefix
        (see `reuse`): full blocks are shared, a partly filled last block is copied. Otherwise the new sequence is an
        ordinary one. Raises the same errors as `add`. The source must be live and have the same cache salt, and `spec`
        must have no family.
        """
        source = self.sequences[source_id]
        assert source.cache_salt == spec.cache_salt, "a fork across cache salts"
        assert not spec.family, "a fork has its source"
        self.add(spec)
        self.sequences[spec.sequence_id].relatives = [source]

    def abort(self, sequence_id: str) -> bool:
        """Ends a sequence without an outcome. Returns False if no live sequence has this id.

        If a plan in flight contains the sequence, its blocks and row are freed when that plan is applied, and the
        plan's result for it is ignored.
        """
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        self._leave_family(sequence)
        self.scheduler.finish(sequence)
        self.tally.finished["abort"] += 1
        return True

    def schedule(self, now_s: float = 0.0) -> StepPlan:
        """Plans the next step. The plan is empty if there is nothing to compute; an empty plan must not be run.

        `now_s` is the caller's clock in seconds, 0 if there is none. It is used for the scheduler delay, for batches
        that gather and for deciding whether to draft tokens.

        Every plan that is not empty must be run and applied, in order. The next step may be planned before that. It
        then leaves out sequences with draft tokens in flight, because what follows these is known only from the result.
        """
        return self.scheduler.schedule(now_s)

    def seconds_to_batch(self, now_s: float) -> float:
        """Returns the seconds until a gathering batch must start (see `batching`); infinite if no batch gathers."""
        return self.scheduler.batches.seconds_left(now_s)

    def apply(self, plan: StepPlan, result: StepResult, now_s: float = 0.0) -> list[Outcome]:
        """Applies a step's result. Returns one outcome for each live sequence with tokens or a vector, in plan order.

        A sequence whose outcome has a finish reason has ended. Its row and blocks are free, or, if a later plan in
        flight contains the sequence, will be free when that plan is applied.
        """
        if plan.empty:
            return []
        assert plan.step == result.step == self._num_applied + 1, (plan.step, result.step, self._num_applied)
        self._num_applied = plan.step
        num_samples = sum(share.samples for share in plan.scheduled)
        self.scheduler.landed(plan.step, now_s, sum(map(len, result.token_ids)) - num_samples)
        assert len(result.token_ids) == len(result.logprobs) == num_samples, "the result is not that of the plan"
        samples = zip(result.token_ids, result.logprobs, strict=True)
        assert len(result.vectors) == sum(share.pools for share in plan.scheduled), "the result is not that of the plan"
        vectors = iter(result.vectors)
        outcomes: list[Outcome] = []
        for share in plan.scheduled:
            sampled = next(samples) if share.samples else None
            vector = next(vectors) if share.pools else None
            sequence = self.scheduler.land(share, len(sampled[0]) if sampled is not None else 0)
            if sequence.status is Status.FINISHED:
                continue
            self.prefix_cache.publish(sequence)
            if sampled is not None:
                outcomes.append(self._take_tokens(sequence, *sampled))
            elif vector is not None:
                outcomes.append(self._take_vector(sequence, vector))
        return outcomes

    def counters(self) -> Counters:
        """Returns the totals and the current load. May be called from any thread."""
        scheduler, tally = self.scheduler, self.tally
        return Counters(
            num_running=len(scheduler.running),
            num_waiting=scheduler.waiting.num_waiting,
            num_waiting_tokens=scheduler.waiting.num_tokens,
            num_free_blocks=self.pool.num_free,
            step=tally.step,
            prompt_tokens=tally.prompt_tokens,
            generation_tokens=tally.generation_tokens,
            prefix_cache_queries=tally.prefix_cache_queries,
            prefix_cache_hits=tally.prefix_cache_hits,
            cached_tokens=tally.cached_tokens,
            preemptions=tally.preemptions,
            swapped_out_blocks=tally.swapped_out_blocks,
            swapped_in_blocks=tally.swapped_in_blocks,
            drafted_tokens=tally.drafted_tokens,
            accepted_tokens=tally.accepted_tokens,
            finished=tuple(tally.finished.items()),
        )

    # --- results ------------------------------------------------------------------------------------------------------

    def _take_tokens(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[SampledLogprobs, ...]
    ) -> Outcome:
        # A later plan in flight assumed exactly one token.
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
            self._end(sequence, verdict)
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
        )

    def _take_vector(self, sequence: Sequence, vector: bytes) -> Outcome:
        self._count(sequence, 0, 0)
        self._end(sequence, Verdict("stop"))
        return Outcome(
            sequence_id=sequence.sequence_id,
            position=0,
            token_ids=(),
            finish_reason="stop",
            num_cached_tokens=sequence.num_cached_tokens,
            first_scheduled_step=sequence.first_scheduled_step,
            vector=vector,
        )

    def _count(self, sequence: Sequence, position: int, num_tokens: int) -> None:
        self.tally.generation_tokens += num_tokens
        if position == sequence.num_carried_tokens:
            self.tally.prompt_tokens += sequence.num_prompt_tokens

    def _end(self, sequence: Sequence, verdict: Verdict) -> None:
        del self.sequences[sequence.sequence_id]
        self._leave_family(sequence)
        self.scheduler.finish(sequence)
        self.tally.finished[verdict.reason] += 1

    def _leave_family(self, sequence: Sequence) -> None:
        if not sequence.family:
            return
        members = self._families[sequence.family, sequence.cache_salt]
        members.remove(sequence)
        if not members:
            del self._families[sequence.family, sequence.cache_salt]

    # --- admission ----------------------------------------------------------------------------------------------------

    def _check(self, spec: SequenceSpec) -> None:
        _require(bool(spec.prompt_token_ids), "prompt", "The prompt has no tokens.")
        if spec.pooling is not None:
            self._check_pooling(spec, spec.pooling)
        else:
            self._check_output(spec)
        for token_ids in (spec.prompt_token_ids, spec.output_token_ids):
            in_range = not token_ids or (min(token_ids) >= 0 and max(token_ids) < self.facts.vocab_size)
            _require(in_range, "prompt", f"Token ids must be between 0 and {self.facts.vocab_size - 1}.")
        _require(
            all(len(block_hash) == HASH_BYTES for block_hash in spec.block_hashes),
            "block_hashes",
            f"Block hashes must have {HASH_BYTES} bytes.",
        )

    def _check_pooling(self, spec: SequenceSpec, pooling: PoolingParams) -> None:
        _require(not spec.output_token_ids, "prompt", "A pooling sequence has no output that it could continue.")
        check_pooling(pooling, self.facts.embedding_size)
        if len(spec.prompt_token_ids) > self.max_prompt_len:
            message = (
                f"{self._what_is_short()} takes at most {self.max_prompt_len} tokens, and the input has "
                f"{len(spec.prompt_token_ids)}. Shorten the input."
            )
            raise ServiceError("context_length_exceeded", message, param="prompt")

    def _check_output(self, spec: SequenceSpec) -> None:
        if not self.facts.generates:
            message = "This model gives embeddings only: its checkpoint has no language model head."
            raise ServiceError("unsupported_parameter", message, param="model")
        num_prompt, num_output = len(spec.prompt_token_ids), len(spec.output_token_ids)
        if num_prompt + num_output >= self.max_model_len:
            raise ServiceError("context_length_exceeded", self._too_long(num_prompt + num_output), param="prompt")
        _require(
            num_output < spec.params.max_tokens,
            "max_tokens",
            f"'max_tokens' is {spec.params.max_tokens}, and {num_output} tokens have been generated already.",
        )

    def _too_long(self, num_tokens: int) -> str:
        return (
            f"{self._what_is_short()} takes at most {self.max_model_len} tokens, prompt and output together, and the "
            f"prompt has {num_tokens}, which leaves no room for output. Shorten the prompt."
        )

    def _what_is_short(self) -> str:
        whole_context = self.max_model_len == self.facts.max_model_len
        return "This model" if whole_context else "This engine's cache"


def _append(sequence: Sequence, token_ids: tuple[int, ...]) -> Verdict | None:
    """Appends sampled tokens up to the first that ends the sequence. Returns why it ends; None if it goes on."""
    assert token_ids, f"nothing was sampled for {sequence.sequence_id}"
    for position, token_id in enumerate(token_ids, sequence.num_output_tokens):
        sequence.tokens.append(token_id)
        if verdict := sequence.rules.verdict(token_id, position):
            return verdict
    return None


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise ServiceError("invalid_value", message, param=param)
