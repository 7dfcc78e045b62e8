"""The engine's core under any order of submissions, aborts, plans and results, with pools too small for comfort.

A model worker follows the rules of `plan.py` and remembers of each place in each block which prefix it holds the KV of.
A wrong prefix hit, a block given away too early, a row that two sequences share, a token computed twice or never: each
shows as a place with other content than the range of a plan needs.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.engine.core import invariants
from services.engine.core.core import Core
from services.engine.core.plan import (
    CoreLimits,
    EngineFacts,
    NewSequence,
    SampledLogprobs,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from services.engine.core.request import Outcome, SequenceSpec
from shared.blocks import chain_hashes, split_hashes
from shared.codec import pack_ids
from shared.errors import ServiceError
from shared.sampling import SamplingParams

EOS, STOP = 2, 9
SAMPLED = (EOS, STOP, *range(10, 20))
DRAIN_STEPS = 3000


@dataclass
class Row:
    """A row of the worker's state table; `prefixes[i]` stands for the tokens up to and including the i-th."""

    request_id: str
    salt: bytes
    tokens: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def append(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            self.tokens.append(token_id)
            self.prefixes.append(hash((self.prefixes[-1] if self.prefixes else self.salt, token_id)))

    def with_guesses(self, token_ids: tuple[int, ...]) -> list[int]:
        """The prefixes as they are if the guesses are right."""
        guessed = Row("", self.salt, list(self.tokens), list(self.prefixes))
        guessed.append(token_ids)
        return guessed.prefixes


class ModelWorker:
    """Carries out plans in order and asserts that each finds the KV that it builds on."""

    def __init__(self, facts: EngineFacts, max_num_seqs: int) -> None:
        self.facts = facts
        self.max_num_seqs = max_num_seqs
        self.rows: dict[int, Row] = {}
        self.kv: dict[tuple[int, int], int] = {}
        """Block and offset to the prefix whose last token's KV is there."""
        self.host: dict[int, dict[int, int]] = {}
        """Host block to offset to prefix."""

    def run(self, plan: StepPlan, salts: dict[str, bytes], draw: random.Random) -> StepResult:
        for row in plan.freed_rows:
            del self.rows[row]
        self.copy(plan)
        for new in plan.new:
            self.fill(new, salts[new.request_id])
        assert len({share.row for share in plan.scheduled}) == len(plan.scheduled), "a row twice in one plan"
        for share in plan.scheduled:
            self.rows[share.row].blocks += share.new_block_ids
        joined = {new.row for new in plan.new}
        for share in plan.scheduled:
            self.write(share, {each.row: each.start for each in plan.scheduled if each.row in joined})
        for share in plan.scheduled:
            self.read(share)
        sampled: list[tuple[int, ...]] = []
        for share in plan.scheduled:
            if share.samples:
                sampled.append(self.sample(share.draft_token_ids, draw))
                self.rows[share.row].append(sampled[-1])
        logprobs = tuple(tuple(SampledLogprobs(-1.0) for _ in tokens) for tokens in sampled)
        return StepResult(plan.step, tuple(sampled), logprobs)

    def sample(self, guesses: tuple[int, ...], draw: random.Random) -> tuple[int, ...]:
        """Some of the guesses and one token more, which is not the next guess."""
        right = guesses[: draw.randint(0, len(guesses))]
        wrong = guesses[len(right) : len(right) + 1]
        few = draw.choice([SAMPLED, (10, 11), (10, 11)])
        return (*right, draw.choice([token for token in few if token not in wrong]))

    def copy(self, plan: StepPlan) -> None:
        for pairs in (plan.swap_out, plan.swap_in, plan.copies):
            assert len({target for _, target in pairs}) == len(pairs), "two copies to one block"
        for block, host_block in plan.swap_out:
            assert 0 <= host_block < self.facts.num_host_blocks
            self.host[host_block] = self.content(block)
        held = {block for row in self.rows.values() for block in row.blocks}
        for host_block, block in plan.swap_in:
            assert block not in held, "copied into a block that is held"
            self.put(block, self.host[host_block])
        for source, block in plan.copies:
            assert block not in held, "copied into a block that is held"
            self.put(block, self.content(source))

    def content(self, block: int) -> dict[int, int]:
        places = ((offset, self.kv.get((block, offset))) for offset in range(self.facts.block_size))
        return {offset: prefix for offset, prefix in places if prefix is not None}

    def put(self, block: int, content: dict[int, int]) -> None:
        for offset in range(self.facts.block_size):
            self.kv.pop((block, offset), None)
        self.kv.update({(block, offset): prefix for offset, prefix in content.items()})

    def fill(self, new: NewSequence, salt: bytes) -> None:
        assert 0 <= new.row < self.max_num_seqs
        assert new.row not in self.rows, "the row is taken"
        row = self.rows[new.row] = Row(new.request_id, salt, blocks=list(new.block_ids))
        row.append(new.token_ids)

    def write(self, share: ScheduledSequence, readers: dict[int, int]) -> None:
        """`readers`: where the sequences that join in this plan start. What is before that they only read."""
        row, end = self.rows[share.row], share.start + share.num_tokens
        assert share.num_tokens > 0
        num_known = end - len(share.draft_token_ids)
        assert num_known <= len(row.tokens), "tokens that nobody knows"
        assert share.samples == (num_known == len(row.tokens))
        assert share.samples or not share.draft_token_ids
        prefixes = row.with_guesses(share.draft_token_ids)
        others = {block for number in self.rows if number != share.row for block in self.written(number, readers)}
        for position in range(share.start, end):
            place = self.place(row, position)
            assert place[0] not in others, "writes into a block of another"
            self.kv[place] = prefixes[position]

    def written(self, number: int, readers: dict[int, int]) -> list[int]:
        """The blocks of a row that nobody else may write: all, but for those that it joins this plan to read."""
        return self.rows[number].blocks[readers.get(number, 0) // self.facts.block_size :]

    def read(self, share: ScheduledSequence) -> None:
        row = self.rows[share.row]
        for position in range(share.start):
            assert self.kv.get(self.place(row, position)) == row.prefixes[position], f"lost KV at {position}"

    def place(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self.facts.block_size], position % self.facts.block_size


@dataclass
class Known:
    """What the submitter knows of a live sequence."""

    spec: SequenceSpec
    output: list[int]
    cumulative: float = 0.0


class EngineCoreMachine(RuleBasedStateMachine):
    """Any order of operations; the invariants hold after each, and in the end everything has ended."""

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.sampled_from([1, 2, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 24),
        caching=st.booleans(),
        chunked=st.booleans(),
        depth=st.integers(1, 3),
        num_guesses=st.sampled_from([0, 1, 4, 4]),
        num_host_blocks=st.sampled_from([0, 3, 20, 20]),
        ratio=st.sampled_from([None, None, 0.0, 0.5, 1.0]),
        delay=st.sampled_from([0.0, 0.0, 2.0]),
        clock=st.booleans(),
        crowd=st.lists(st.tuples(st.sampled_from([0, 1, 1]), st.integers(1, 12)), max_size=6),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        chunked: bool,
        depth: int,
        num_guesses: int,
        num_host_blocks: int,
        ratio: float | None,
        delay: float,
        clock: bool,
        crowd: list[tuple[int, int]],
    ) -> None:
        """`crowd`: sequences that are there from the beginning, by family and length of the prompt, and want much."""
        self.limits = CoreLimits(max_num_seqs, max(budget, max_num_seqs), caching, chunked, ratio, delay, num_guesses)
        self.facts = EngineFacts(num_blocks, block_size, 40, 1000, frozenset({EOS}), num_host_blocks)
        self.now_s = 0.0
        self.clock = clock or delay > 0
        self.depth = depth
        self.core = Core(self.limits, self.facts)
        self.worker = ModelWorker(self.facts, max_num_seqs)
        self.live: dict[str, Known] = {}
        self.salts: dict[str, bytes] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.ended: Counter[str] = Counter()
        self.num_generated = 0
        for number, (kind, length) in enumerate(crowd):
            self.salts[f"c{number}"] = b""
            prompt = tuple(range(100 * (kind + 1), 100 * (kind + 1) + min(length, self.room() - 1)))
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            related = f"crowd {kind}" if kind else ""
            self.enter(SequenceSpec(f"c{number}", prompt, params, arrival=number, family=related), None)

    # --- operations ---------------------------------------------------------------------------------------------------

    @rule(
        family=st.sampled_from([0, 0, 0, 1]),
        shared=st.sampled_from([0, 2, 4, 8, 8, 12]),
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
    ) -> None:
        """One sequence, a fork of a live one, or the choices of a prompt, that arrive together."""
        if clamped:
            shared = max(1, min(shared, self.room() - len(tail) - len(output) - 1))
        prompt = (*range(100 * (family + 1), 100 * (family + 1) + shared), *tail)
        forked = sorted(self.live)[source % len(self.live)] if self.live and source is not None else None
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
        )
        hashes = split_hashes(chain_hashes(pack_ids([*prompt, *output]), self.facts.block_size, salt))
        related = f"family {len(self.salts)}" if choices > 1 and forked is None else ""
        for number in range(choices if related else 1):
            request_id = f"s{len(self.salts)}"
            self.salts[request_id] = salt
            given = tuple(hashes[:num_hashes])
            rank = priority + number * spread
            self.enter(
                SequenceSpec(request_id, prompt, params, tuple(output), given, salt, rank, arrival, related), forked
            )

    def room(self) -> int:
        return min(self.facts.max_model_len, self.facts.num_blocks * self.facts.block_size + 1)

    def enter(self, spec: SequenceSpec, forked: str | None) -> None:
        prompt, output = spec.prompt_token_ids, spec.output_token_ids
        try:
            if forked is None:
                self.core.add(spec)
            else:
                self.core.fork(forked, spec)
        except ServiceError:
            assert not prompt or len(prompt) + len(output) >= self.room() or len(output) >= spec.params.max_tokens
        else:
            self.live[spec.request_id] = Known(spec, list(output))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        request_id = sorted(self.live)[pick % len(self.live)]
        del self.live[request_id]
        self.ended["abort"] += 1
        assert self.core.abort(request_id)
        assert not self.core.abort(request_id)

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule(seed=st.integers(0, 2**16))
    def plan(self, seed: int) -> None:
        oldest = self.core.scheduler.running[0] if self.core.scheduler.running else None
        # Without a clock nothing holds guesses back.
        self.now_s += seed % 3 if self.clock else 0
        plan = self.core.schedule(self.now_s)
        self.check_plan(plan)
        if plan.empty:
            assert plan == StepPlan(plan.step)
            assert self.in_flight or not self.live, "work to do, none of it planned, and nothing to wait for"
            return
        if oldest and not self.in_flight and self.limits.enable_chunked_prefill:
            assert oldest.num_in_flight == 1, "the oldest running sequence was passed over"
        result = self.worker.run(plan, self.salts, random.Random(seed))
        self.in_flight.append((plan, result))

    @precondition(lambda self: self.in_flight)
    @rule()
    def apply(self) -> None:
        plan, result = self.in_flight.popleft()
        outcomes = self.core.apply(plan, result, self.now_s)
        assert len({each.request_id for each in outcomes}) == len(outcomes)
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
        counters = self.core.counters()
        assert counters.num_running + counters.num_waiting == len(self.live)
        assert dict(counters.finished) == {reason: self.ended[reason] for reason in ("stop", "length", "abort")}
        assert counters.generation_tokens == self.num_generated
        for sequence in self.core.sequences.values():
            packed, salt = pack_ids(sequence.tokens), self.salts[sequence.request_id]
            chain = split_hashes(chain_hashes(packed, self.facts.block_size, salt))
            assert sequence.block_hashes == chain[: len(sequence.block_hashes)], "a hash of other tokens"

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens == sum(share.num_tokens for share in plan.scheduled)
        assert len(plan.scheduled) <= self.limits.max_num_seqs
        by_row = {share.row: share for share in plan.scheduled}
        for new in plan.new:
            assert list(new.token_ids) == [*self.live[new.request_id].spec.prompt_token_ids, *self.output_of(new)]
            assert by_row[new.row].samples or self.limits.enable_chunked_prefill, "a part of a prompt was planned"
        if plan.num_tokens > self.limits.max_num_batched_tokens:
            assert not self.limits.enable_chunked_prefill
            assert len(plan.scheduled) == len(plan.new) == 1, "more than the budget, and not one sequence alone"

    def output_of(self, new: NewSequence) -> list[int]:
        return self.live[new.request_id].output

    def check_outcome(self, outcome: Outcome) -> None:
        known = self.live[outcome.request_id]
        params = known.spec.params
        assert outcome.position == len(known.output), "a gap or a repeat"
        assert outcome.token_ids
        known.output += outcome.token_ids
        known.cumulative -= len(outcome.token_ids)
        self.num_generated += len(outcome.token_ids)
        assert outcome.cumulative_logprob == known.cumulative
        assert len(outcome.logprobs) == (len(outcome.token_ids) if params.logprobs is not None else 0)
        assert outcome.num_cached_tokens <= len(known.spec.prompt_token_ids)
        ends = [self.ending(known, position) for position in range(outcome.position, len(known.output))]
        assert not any(ends[:-1]), "tokens after the end"
        assert outcome.finish_reason == ends[-1]
        if outcome.finish_reason:
            self.ended[outcome.finish_reason] += 1
            del self.live[outcome.request_id]

    def ending(self, known: Known, position: int) -> str | None:
        params, token_id = known.spec.params, known.output[position]
        if position >= params.min_tokens:
            if token_id == EOS and not params.ignore_eos:
                return "stop"
            if token_id in params.stop_token_ids:
                return "stop"
        full = len(known.spec.prompt_token_ids) + position + 1 >= self.room()
        return "length" if full or position + 1 >= params.max_tokens else None

    def teardown(self) -> None:
        """Everything that was accepted ends, and everything that was taken is given back."""
        if not hasattr(self, "core"):
            return
        for seed in range(DRAIN_STEPS):
            if not self.live and not self.in_flight:
                break
            in_flight = len(self.in_flight)
            if in_flight < self.depth:
                self.plan(seed)
            if self.in_flight and len(self.in_flight) in (in_flight, self.depth):
                self.apply()
            self.holds_together()
        assert not self.live, f"{len(self.live)} sequences have not ended"
        assert self.core.pool.num_free == self.facts.num_blocks
        assert self.core.swap.pool.num_free == self.facts.num_host_blocks
        assert not self.core._families  # pyright: ignore[reportPrivateUsage]
        assert self.core.scheduler.rows.num_free == self.limits.max_num_seqs


EngineCoreMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineCore = EngineCoreMachine.TestCase
