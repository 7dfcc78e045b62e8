"""The engine's core under any order of submissions, aborts, plans and results, with pools too small for comfort.

Each plan is carried out by `engine_worker.ModelWorker`, and `invariants.check` runs after every operation.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import (
    CoreLimits,
    EngineFacts,
    NewSequence,
    StepPlan,
    StepResult,
    prompt_logprob_rows,
)
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.services.engine.core.sequence import Status
from antiphon.shared.blocks import chain_hashes, split_hashes
from antiphon.shared.codec import pack_ids, unpack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import KvSource
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.pooling import POOLING_KINDS, PoolingKind, PoolingParams
from antiphon.shared.parameters.sampling import BeamParams, SamplingParams
from tests.property.engine_worker import EOS, STOP, ModelWorker
from tests.property.transfers import Transfers

DRAIN_STEPS = 3000


@dataclass
class Known:
    """What the submitter knows of a live sequence."""

    spec: SequenceSpec
    output: list[int]
    cumulative: float = 0.0
    reported: list[int] = field(default_factory=list)
    """Prompt tokens whose log probabilities were reported."""


class EngineCoreMachine(RuleBasedStateMachine):
    """Any order of operations; the invariants hold after each, and in the end everything has ended."""

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 4, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 2, 3, 4, 5, 6, 8, 10, 24]),
        prompts=st.sampled_from([None, None, 1, 3, 7]),
        caching=st.booleans(),
        chunked=st.booleans(),
        depth=st.integers(1, 3),
        num_draft_tokens=st.sampled_from([0, 1, 4, 4]),
        num_host_blocks=st.sampled_from([0, 3, 20, 20]),
        ratio=st.sampled_from([None, None, 0.0, 0.5, 1.0]),
        delay=st.sampled_from([0.0, 0.0, 2.0]),
        clock=st.booleans(),
        rank=st.sampled_from([0, -1, 1]),
        num_stages=st.sampled_from([1, 1, 2, 3]),
        crowd=st.lists(st.tuples(st.sampled_from([0, 1, 1]), st.integers(1, 12)), max_size=6),
        waits=st.sampled_from([0.0, 0.0, 0.3, 0.8]),
        spare_states=st.sampled_from([None, None, 0, 2, 20]),
        interval=st.integers(1, 4),
        drafting=st.sampled_from(["text", "text", "layer", "both"]),
        windowed=st.sampled_from([0, 0, 1, 1, 2]),
        window=st.integers(1, 12),
        tier=st.sampled_from([0, 0, 2, 8]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        prompts: int | None,
        caching: bool,
        chunked: bool,
        depth: int,
        num_draft_tokens: int,
        num_host_blocks: int,
        ratio: float | None,
        delay: float,
        clock: bool,
        rank: int,
        num_stages: int,
        crowd: list[tuple[int, int]],
        waits: float,
        spare_states: int | None,
        interval: int,
        drafting: str,
        windowed: int,
        window: int,
        tier: int,
    ) -> None:
        """Begins with `crowd`: sequences that want much, by family and length of the prompt.

        `rank`: whether the later ones of them come first. `num_stages`: how many plans are computed at a time.
        `spare_states`: slots of recurrent states besides those that the rows need; None: there are no states.
        `interval`: blocks from one snapshot of a state to the next. `drafting`: where draft tokens come from.
        `windowed`: number of groups of layers whose blocks are freed behind `window` tokens.
        `tier`: tokens from which on blocks are stored below the KV cache; 0: there is no tier.
        """
        # long: one parameter for each thing that engines may have
        prompts = prompts if chunked else None
        windowed = windowed if spare_states is None else 0
        num_blocks, num_host_blocks = num_blocks * (1 + windowed), num_host_blocks * (1 + windowed)
        self.limits = CoreLimits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max(budget, max_num_seqs), enable_prefix_caching=caching,
            enable_chunked_prefill=chunked, kv_cache_ratio=ratio, scheduler_delay_factor=delay,
            num_speculative_tokens=num_draft_tokens, step_prompt_tokens=prompts, use_lookahead=drafting != "layer",
        )  # fmt: skip
        # With the larger vocabulary a step reports log probabilities of no more than two prompt tokens.
        vocab_size = 1000 if num_blocks % 2 else 2**22
        self.facts = EngineFacts(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=40,
            vocab_size=vocab_size,
            eos_token_ids=frozenset({EOS}),
            num_host_blocks=num_host_blocks,
            embedding_size=4,
            pooling_kind="cls",
            num_stages=num_stages,
            num_windowed_groups=windowed,
            window=window if windowed else 0,
            has_draft_layer=drafting != "text" and num_stages == 1,
            num_states=0 if spare_states is None else 3 * max_num_seqs + 3 + spare_states,
            state_interval=interval * block_size,
            state_pieces=spare_states % 3 if spare_states else 0,
        )
        self.now_s = 0.0
        self.clock = clock or delay > 0
        self.depth = depth if num_stages == 1 else num_stages
        self.drafting, self.num_predicted = drafting, 0
        self.num_reports = prompt_logprob_rows(self.facts.vocab_size)
        self.core = Core(self.limits, self.facts)
        # A worker takes no plan ahead if a sequence may wait.
        self.worker = ModelWorker(self.facts, max_num_seqs, waits if self.depth == 1 or num_stages > 1 else 0.0)
        self.transfers = Transfers(self.worker)
        if tier and caching:
            self.core.tier.stored, self.core.tier.tokens_min = self.transfers.stored, tier
        self.live: dict[str, Known] = {}
        self.salts: dict[str, bytes] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.passed_over: dict[str, int] = {}
        self.num_generated = 0
        self.num_copies = self.num_beams_preempted = self.num_promoted = 0
        self.add_crowd(crowd, rank)

    def add_crowd(self, crowd: list[tuple[int, int]], rank: int) -> None:
        for number, (kind, length) in enumerate(crowd):
            self.salts[f"c{number}"] = b""
            prompt = tuple(range(100 * (kind + 1), 100 * (kind + 1) + min(length, self.room() - 1)))
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            related = f"crowd {kind}" if kind else ""
            spec = SequenceSpec(
                sequence_id=f"c{number}", prompt_token_ids=prompt, params=params,
                priority=rank * number, sequence_group=related,
            )  # fmt: skip
            self.enter(spec, None)

    # --- operations ---------------------------------------------------------------------------------------------------

    @rule(
        family=st.sampled_from([0, 0, 0, 1]),
        shared=st.sampled_from([0, 2, 4, 8, 8, 12, 24]),
        tail=st.lists(st.integers(20, 21), max_size=2),
        output=st.lists(st.sampled_from([10, 11]), max_size=2),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        salt=st.sampled_from([b"", b"", b"tenant"]),
        priority=st.integers(-1, 1),
        arrival=st.integers(0, 3),
        num_hashes=st.sampled_from([0, 1, 99]),
        source=st.none() | st.integers(0, 1000),
        choices=st.sampled_from([1, 1, 2, 3]),
        spread=st.sampled_from([0, 0, 1, -1]),
        clamped=st.sampled_from([True, True, True, False]),
        client=st.sampled_from([("", 0), ("", 0), ("a", 0), ("b", 1)]),
        width=st.sampled_from([0, 0, 0, 2, 3]),
        reports=st.sampled_from([False, False, True]),
        transfer=st.sampled_from(["", "", "load", "save"]),
        idle=st.sampled_from([0.0, 0.0, 5.0, 1e9]),
    )
    def submit(
        self,
        family: int,
        shared: int,
        tail: list[int],
        output: list[int],
        max_tokens: int,
        min_tokens: int,
        flags: tuple[bool, bool, bool],
        salt: bytes,
        priority: int,
        arrival: int,
        num_hashes: int,
        source: int | None,
        choices: int,
        spread: int,
        clamped: bool,
        client: tuple[str, int],
        width: int,
        reports: bool,
        transfer: str,
        idle: float,
    ) -> None:
        """One sequence, a fork of a live one, or the choices of a prompt, that arrive together.

        `idle`: for how long they are idle work.
        `transfer`: whether their KV comes from another engine, or goes to one. `width`: of a beam search for the
        choices; 0 if they sample. `reports`: whether log probabilities of the prompt are asked for.
        """
        # long: one parameter for each thing that sequences may have
        if clamped:
            shared = max(1, min(shared, self.room() - len(tail) - len(output) - 1))
        prompt = (*range(100 * (family + 1), 100 * (family + 1) + shared), *tail)
        sources = sorted(name for name, known in self.live.items() if known.spec.params.beam is None)
        forked = sources[source % len(sources)] if sources and source is not None and not width else None
        if forked is not None:
            known = self.live[forked]
            prompt, salt = known.spec.prompt_token_ids, known.spec.cache_salt
            output = known.output[: len(known.output) - len(output)]
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=flags[0],
            stop_token_ids=(STOP,) if flags[1] else (),
            logprobs=0 if flags[2] else None,
            prompt_logprobs=0 if reports and not width else None,
            grammar=Grammar("json_object", "") if len(tail) == 1 and not width else None,
        )
        if width:
            choices, output, params = min(choices, width), [], msgspec.structs.replace(params, temperature=0.0)
        if transfer == "save":
            width, output, params = 0, [], SamplingParams(max_tokens=1, ignore_eos=flags[0])
        hashes = split_hashes(chain_hashes(pack_ids([*prompt, *output]), self.facts.block_size, salt))
        related = f"family {len(self.salts)}" if choices > 1 and forked is None else ""
        for number in range(choices if related else 1):
            sequence_id = f"s{len(self.salts)}"
            self.salts[sequence_id] = salt
            given, rank = tuple(hashes[:num_hashes]), priority + number * spread
            if width:
                params = msgspec.structs.replace(params, beam=BeamParams(width, number, early_stopping=spread > 0))
            name, client_rank = client
            spec = SequenceSpec(
                sequence_id=sequence_id, prompt_token_ids=prompt, params=params, output_token_ids=tuple(output),
                block_hashes=given, cache_salt=salt, priority=rank, arrival=arrival, sequence_group=related,
                client=name, client_weight=1.0 + client_rank, client_priority=client_rank,
                idle_until_s=self.now_s + idle if idle else 0.0,
            )  # fmt: skip
            self.enter(with_transfer(spec, transfer), forked)

    @rule(
        length=st.integers(1, 40),
        kind=st.sampled_from([None, *POOLING_KINDS]),
        dimensions=st.sampled_from([None, None, 1, 4, 5]),
        priority=st.integers(-1, 1),
        output=st.sampled_from([(), (), (), (10,)]),
    )
    def submit_pooling(
        self, length: int, kind: PoolingKind | None, dimensions: int | None, priority: int, output: tuple[int, ...]
    ) -> None:
        """A pooling sequence, whose prompt begins like those of the other sequences."""
        sequence_id = f"v{len(self.salts)}"
        self.salts[sequence_id] = b""
        params = PoolingParams(kind=kind, dimensions=dimensions)
        spec = SequenceSpec(
            sequence_id=sequence_id,
            prompt_token_ids=tuple(range(100, 100 + length)),
            params=SamplingParams(max_tokens=1),
            output_token_ids=output,
            priority=priority,
            pooling=params,
        )
        most = min(self.facts.max_model_len, self.capacity())
        try:
            self.core.add(spec)
        except ServiceError:
            assert length > most or output or dimensions == 5
        else:
            self.live[sequence_id] = Known(spec, [])

    def room(self) -> int:
        return min(self.facts.max_model_len, self.capacity() + 1)

    def capacity(self) -> int:
        return self.facts.paging.capacity(self.facts.num_blocks, self.limits.most_tokens)

    def enter(self, spec: SequenceSpec, forked: str | None) -> None:
        prompt, output = spec.prompt_token_ids, spec.output_token_ids
        if self.core.tier.stored is not None and len(self.salts) % 2:
            self.transfers.store(self.core, (*prompt, *output), spec.cache_salt)
        try:
            if forked is None:
                self.core.add(spec)
            else:
                self.core.fork(forked, spec)
        except ServiceError:
            too_long = not prompt or len(prompt) + len(output) >= self.room() or len(output) >= spec.params.max_tokens
            assert too_long or (spec.params.beam is not None and not self.holds_beams(spec, spec.params.beam.width))
        else:
            self.live[spec.sequence_id] = Known(spec, list(output))

    def holds_beams(self, spec: SequenceSpec, width: int) -> bool:
        """Whether the rows and blocks are enough for a beam search that is alone."""
        length = min(len(spec.prompt_token_ids) + spec.params.max_tokens, self.room())
        shared, size = len(spec.prompt_token_ids) // self.facts.block_size, self.facts.block_size
        own, columns = -(-(length - 1) // size) - shared, self.facts.paging.most_columns(self.limits.most_tokens)
        blocks = shared + width * own
        blocks += self.facts.num_windowed_groups * (min(shared, columns) + width * min(own, columns))
        return width <= self.limits.max_num_seqs and blocks <= self.facts.num_blocks

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        sequence_id = sorted(self.live)[pick % len(self.live)]
        del self.live[sequence_id]
        assert self.core.abort(sequence_id)
        assert not self.core.abort(sequence_id)

    @rule()
    def take_meta(self) -> None:
        """Passes on what the core wants of the other half of the transfers."""
        self.transfers.take(self.core, self.salts)

    @precondition(lambda self: self.transfers.busy)
    @rule(pick=st.integers(0, 1000), share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def end_transfer(self, pick: int, share: float) -> None:
        """Ends a load, which may have brought only a part, or a save."""
        self.core.transferred(self.transfers.end(pick, share))

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule(seed=st.integers(0, 2**16))
    def plan(self, seed: int) -> None:
        oldest = self.core.residency.running[0] if self.core.residency.running else None
        # Without a clock nothing holds guesses back.
        self.now_s += seed % 3 if self.clock else 0
        idle = [each for each in self.core.residency.running if each.idle]
        searching = [group for group in self.core.beam_groups if len(group.beams) > 1]
        plan = self.core.schedule(self.now_s)
        self.num_beams_preempted += sum(len(group.beams) == 1 for group in searching)
        self.num_promoted += sum(not each.idle for each in idle)
        others = self.core.residency.waiting.num_waiting + self.core.residency.num_ordinary
        if oldest is not None and oldest.idle and (oldest.status is Status.PREEMPTED or others):
            oldest = None  # gives way
        self.check_plan(plan)
        if plan.empty:
            assert plan == StepPlan(step=plan.step)
            self.take_meta()
            waits = self.in_flight or self.transfers.busy
            assert waits or not self.live, "work to do, none of it planned, and nothing to wait for"
            return
        reports = sum(share.num_prompt_logprobs for share in plan.scheduled)
        assert reports == plan.num_prompt_logprobs <= self.num_reports
        waits = oldest is not None and oldest.beams and not oldest.num_in_flight and not oldest.num_unscheduled_tokens
        waits = waits or (oldest is not None and oldest.again)
        if oldest and not waits and not self.in_flight and self.limits.enable_chunked_prefill:
            # With a clock, the decoding sequences of a client may take turns: each has its own in time.
            passed = 0 if oldest.num_in_flight else self.passed_over.pop(oldest.sequence_id, 0) + 1
            turns = len({each.client for each in self.core.residency.running}) > 1 and self.now_s
            most = self.limits.max_num_seqs if turns else 0
            assert passed <= most, "the oldest running sequence was passed over"
            self.passed_over = {oldest.sequence_id: passed}
        result = self.worker.run(plan, self.salts, random.Random(seed))
        self.in_flight.append((plan, result))

    @precondition(lambda self: self.in_flight)
    @rule()
    def apply(self) -> None:
        plan, result = self.in_flight.popleft()
        outcomes = self.core.apply(plan, result, self.now_s)
        assert len({each.sequence_id for each in outcomes}) == len(outcomes)
        for outcome in outcomes:
            self.check_outcome(outcome)

    @rule(seed=st.integers(0, 2**16), count=st.integers(1, 6))
    def advance(self, seed: int, count: int) -> None:
        """Several steps, as many of them in flight as may be."""
        for number in range(count):
            if len(self.in_flight) < self.depth:
                self.plan(seed + number)
            if len(self.in_flight) == self.depth:
                self.apply()
            self.holds_together()

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def holds_together(self) -> None:
        invariants.check(self.core)
        assert self.core.sequences.keys() == self.live.keys()
        load = self.core.load()
        scheduled = self.core.scheduled_sequences()
        assert load.num_running + load.num_waiting == len(scheduled) + self.core.transfers.num_waiting
        assert self.core.counters().generation_tokens == self.num_generated
        for sequence in (*self.core.sequences.values(), *scheduled):
            packed, salt = pack_ids(sequence.tokens), self.salts[sequence.sequence_id.split()[0]]
            chain = split_hashes(chain_hashes(packed, self.facts.block_size, salt))
            assert sequence.block_hashes == chain[: len(sequence.block_hashes)], "a hash of other tokens"

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens == sum(share.num_tokens for share in plan.scheduled)
        assert len(plan.scheduled) <= self.limits.max_num_seqs
        self.num_copies += len(plan.copies)
        if self.facts.num_stages > 1:
            sampling = {share.row for before, _ in self.in_flight for share in before.scheduled if share.samples}
            assert not sampling.intersection(share.row for share in plan.scheduled), "a token that is still sampled"
        predicting = {share.row for before, _ in self.in_flight for share in before.scheduled if share.num_drafts > 0}
        assert not predicting.intersection(share.row for share in plan.scheduled), "drafts that are not known yet"
        if self.facts.has_draft_layer and self.drafting == "layer":
            joined = {new.row: (new.sequence_id, len(new.token_ids)) for new in plan.new}
            for share in plan.scheduled if self.depth == 1 else ():
                # A sequence that was preempted still has its drafts, whatever row it comes back to.
                if share.row not in joined:
                    row = self.worker.rows[share.row]
                    joined[share.row] = row.sequence_id, len(row.tokens)
                name, count = joined[share.row]
                place, drafts = self.worker.predictions.get(name, (0, ()))
                known = drafts if place == count else ()
                assert share.draft_token_ids == known[: len(share.draft_token_ids)], "drafts from elsewhere"
                self.num_predicted += len(share.draft_token_ids)
        by_row = {share.row: share for share in plan.scheduled}
        for new in plan.new:
            if new.params.beam is None:
                assert list(new.token_ids) == [*self.live[new.sequence_id].spec.prompt_token_ids, *self.output_of(new)]
            whole = by_row[new.row].samples or by_row[new.row].pools or new.params.prompt_logprobs is not None
            assert whole or self.limits.enable_chunked_prefill, "a part of a prompt was planned"
        if plan.num_tokens > self.limits.max_num_batched_tokens:
            assert not self.limits.enable_chunked_prefill
            assert len(plan.scheduled) == len(plan.new) == 1, "more than the budget, and not one sequence alone"

    def output_of(self, new: NewSequence) -> list[int]:
        return self.live[new.sequence_id].output

    def check_outcome(self, outcome: Outcome) -> None:
        known = self.live[outcome.sequence_id]
        params = known.spec.params
        if known.spec.pooling is not None:
            kind = known.spec.pooling.kind or self.facts.pooling_kind
            assert outcome.vector == f"{outcome.sequence_id} {kind}".encode()
            assert (outcome.token_ids, outcome.finish_reason) == ((), "stop")
            del self.live[outcome.sequence_id]
            return
        assert outcome.position == len(known.output), "a gap or a repeat"
        assert outcome.token_ids
        for part in outcome.prompt_logprobs:
            assert part.start == len(known.reported)
            known.reported += unpack_ids(part.token_ids)
        wanted = known.spec.prompt_token_ids if params.prompt_logprobs is not None else ()
        assert tuple(known.reported) == wanted, "the prompt was not reported, or not once"
        known.output += outcome.token_ids
        known.cumulative -= len(outcome.token_ids)
        self.num_generated += len(outcome.token_ids)
        assert outcome.cumulative_logprob == known.cumulative or (params.beam is not None and outcome.finish_reason)
        assert len(outcome.logprobs) == (len(outcome.token_ids) if params.logprobs is not None else 0)
        assert outcome.num_cached_tokens <= len(known.spec.prompt_token_ids)
        ends = [self.ending(known, position) for position in range(outcome.position, len(known.output))]
        assert not any(ends[:-1]), "tokens after the end"
        assert outcome.finish_reason == ends[-1]
        if outcome.finish_reason:
            del self.live[outcome.sequence_id]

    def ending(self, known: Known, position: int) -> str | None:
        params, token_id = known.spec.params, known.output[position]
        if token_id == EOS and params.grammar is not None:
            return "stop"
        # A grammar takes precedence over `min_tokens`.
        if position >= (0 if params.grammar is not None else params.min_tokens):
            if token_id == EOS and not params.ignore_eos:
                return "stop"
            if token_id in params.stop_token_ids:
                return "stop"
        full = len(known.spec.prompt_token_ids) + position + 1 >= self.room()
        return "length" if full or position + 1 >= params.max_tokens else None

    def seen(self) -> "Counter[str]":
        """How often happened what this test is about."""
        counters = self.core.counters()
        return Counter(
            {
                "preempted": counters.preemptions,
                "idle ones preempted": counters.idle_preemptions,
                "swapped in": counters.swapped_in_blocks,
                "copied": self.num_copies,
                "loaded": self.transfers.num_loaded,
                "saved": counters.kv_saved_tokens,
                "from the tier": self.transfers.num_from_tier,
                "beams preempted": self.num_beams_preempted,
                "waited for a mask": self.worker.num_waited,
                "right guesses": counters.accepted_tokens,
                "predicted": self.num_predicted,
                "steps beyond a window": self.worker.num_behind,
                "windows reused": self.worker.num_windows_reused,
                "states read": self.worker.num_states_read,
                "snapshots used": self.worker.num_snapshots_used,
                "wrong guesses": counters.drafted_tokens - counters.accepted_tokens,
            }
        )

    def teardown(self) -> None:
        """Everything that was accepted ends, and everything that was taken is given back."""
        if not hasattr(self, "core"):
            return
        for seed in range(DRAIN_STEPS):
            if not self.live and not self.in_flight:
                break
            self.take_meta()
            if self.transfers.busy:
                self.end_transfer(seed, 1.0)
            in_flight = len(self.in_flight)
            if in_flight < self.depth:
                self.plan(seed)
            if self.in_flight and len(self.in_flight) in (in_flight, self.depth):
                self.apply()
            self.holds_together()
        assert not self.live, f"{len(self.live)} sequences have not ended"
        self.take_meta()
        while self.transfers.busy:
            self.end_transfer(0, 1.0)
        assert self.core.pool.num_free == self.facts.num_blocks
        assert self.core.swap.pool.num_free == self.facts.num_host_blocks
        assert not self.core.groups
        assert self.core.residency.rows.num_free == self.limits.max_num_seqs


def with_transfer(spec: SequenceSpec, transfer: str) -> SequenceSpec:
    """The choices of a prompt have one transfer."""
    if transfer == "save":
        return replace(spec, kv_transfer_id=spec.sequence_id)
    source = KvSource(spec.sequence_group or spec.sequence_id, "somewhere")
    return replace(spec, kv_source=source) if transfer == "load" else spec


EngineCoreMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]  (its metaclass iterates)
)
TestEngineCore = EngineCoreMachine.TestCase
