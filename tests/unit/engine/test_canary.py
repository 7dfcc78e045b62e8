"""The canary: what it compares, when it runs, and that requests do not notice it."""

import ctypes
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from antiphon.services.engine.canary.canary import Canary, WrongResultError
from antiphon.services.engine.canary.checksums import PORTION_BYTES, Checksums
from antiphon.services.engine.canary.guard import WeightGuard
from antiphon.services.engine.canary.measure import Golden, check_deterministic, measure
from antiphon.services.engine.canary.probe import OUTPUT_TOKENS, Observed, difference, digest, probe_spec
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.invariants import check
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts, SampledLogprobs, StepPlan, StepResult
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.services.engine.core.sequence import Status
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.worker.interface import WeightMemory
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.sampling import SamplingParams

FACTS = EngineFacts(num_blocks=64, block_size=4, max_model_len=64, vocab_size=1000)
LIMITS = CoreLimits(max_num_seqs=2, max_num_batched_tokens=64, has_canary_row=True)
GOLDEN = Observed(token_ids=(1, 2), logprobs=(-0.5, -1.5), gaps=(3.0, 0.1))


class CountingWorker:
    """Each token is one more than the number of the sequence's tokens; `drift` is added in each step."""

    def __init__(self, facts: EngineFacts = FACTS, drift: int = 0) -> None:
        self._facts, self._drift, self._steps = facts, drift, 0

    def facts(self) -> EngineFacts:
        return self._facts

    def run(self, plan: StepPlan) -> StepResult:
        self._steps += 1
        tokens = tuple((s.start + s.num_tokens + self._drift * self._steps,) for s in plan.scheduled if s.samples)
        return StepResult(step=plan.step, token_ids=tokens, logprobs=tuple((SampledLogprobs(-0.25),) for _ in tokens))

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("seen", "exact", "told"),
    [
        (GOLDEN, True, ""),
        (Observed(token_ids=(1, 3), logprobs=(-0.5, -1.5)), True, "token 3 instead of 2 at position 1"),
        (Observed(token_ids=(1, 2), logprobs=(-0.5, -1.5 + 1e-9)), True, "log probability"),
        (Observed(token_ids=(1, 2), logprobs=(-0.5, float("nan"))), False, "log probability"),
        (Observed(token_ids=(1, 2), logprobs=(-0.75, -1.5)), False, ""),
        (Observed(token_ids=(1, 2), logprobs=(-1.1, -1.5)), False, "log probability"),
        (
            Observed(token_ids=(1, 3), logprobs=(-0.5, -1.55)),
            False,
            "",
        ),  # the golden value has two candidates that are 0.1 apart
        (Observed(token_ids=(4, 2), logprobs=(-0.5, -1.5)), False, "token 4 instead of 1 at position 0"),
        (Observed(token_ids=(1,), logprobs=(-0.5,)), True, "1 tokens instead of 2"),
        (Observed(token_ids=(), logprobs=(), failed=True), True, "no token could be sampled"),
        (replace(GOLDEN, vector=b"x"), True, "the vector"),
    ],
)
def test_a_result_is_compared_with_the_golden_one(seen: Observed, exact: bool, told: str) -> None:
    found = difference(GOLDEN, seen, exact=exact)
    assert told in found
    assert bool(told) == bool(found)


def test_the_digest_covers_the_bits_of_log_probabilities_only_where_they_are_exact() -> None:
    other = replace(GOLDEN, logprobs=(-0.5, -1.5000001))
    assert digest(GOLDEN, exact=True) != digest(other, exact=True)
    assert digest(GOLDEN, exact=False) == digest(other, exact=False)


def test_the_prompt_spreads_over_the_vocabulary_and_fits_a_short_context() -> None:
    spec = probe_spec(FACTS, 1, 64)
    assert spec is not None
    assert len(set(spec.prompt_token_ids)) == 16
    assert max(spec.prompt_token_ids) - min(spec.prompt_token_ids) > 900
    short = probe_spec(FACTS, 1, 3)
    assert short is not None
    assert len(short.prompt_token_ids) + short.params.max_tokens <= 3
    assert probe_spec(FACTS, 1, 1) is None


def _step(core: Core, worker: CountingWorker, *, urgent_canary: bool = False) -> list[Outcome]:
    plan = core.schedule(urgent_canary=urgent_canary)
    outcomes = [] if plan.empty else core.apply(plan, worker.run(plan))
    check(core)
    return outcomes


def test_the_canary_runs_with_all_rows_taken_and_is_not_counted() -> None:
    core, worker = Core(LIMITS, FACTS), CountingWorker()
    for index in range(3):
        core.add(
            SequenceSpec(
                sequence_id=f"r{index}#1",
                prompt_token_ids=(1, 2, 3),
                params=SamplingParams(max_tokens=30, ignore_eos=True),
            )
        )
    _step(core, worker)
    before = core.counters()
    spec = probe_spec(FACTS, 1, core.checks.max_model_len)
    assert spec is not None
    core.add(spec)
    visible = 0
    while not core.canary_outcomes or core.canary_outcomes[-1].finish_reason is None:
        outcomes = _step(core, worker)
        assert len(outcomes) == 2, "the requests go on beside it"
        visible += len(outcomes)
    assert sum(len(one.token_ids) for one in core.canary_outcomes) == OUTPUT_TOKENS
    after = core.counters()
    assert after.generation_tokens - before.generation_tokens == visible
    assert (core.load().num_running, core.load().num_waiting) == (2, 1)
    assert after.prompt_tokens == before.prompt_tokens
    while core.sequences:
        _step(core, worker)
    assert core.pool.num_free == FACTS.num_blocks
    assert core.pool.num_named == (30 + 3 - 1) // 4, "only the requests, which are equal, are in the prefix cache"


def test_an_urgent_canary_goes_before_a_budget_that_requests_would_use_up() -> None:
    core, worker = Core(replace(LIMITS, max_num_batched_tokens=16), FACTS), CountingWorker()
    core.add(SequenceSpec(sequence_id="long#1", prompt_token_ids=(1,) * 50, params=SamplingParams(max_tokens=2)))
    spec = probe_spec(FACTS, 1, core.checks.max_model_len)
    assert spec is not None
    core.add(spec)
    _step(core, worker)
    assert core.sequences[spec.sequence_id].status is Status.WAITING, "without haste it waits for room"
    _step(core, worker, urgent_canary=True)
    assert core.sequences[spec.sequence_id].status is Status.RUNNING


def _canary(interval_s: float = 2.0, took_s: float = 0.001) -> tuple[Canary, list[str]]:
    golden = Golden(Observed(token_ids=(17, 18, 19, 20), logprobs=(-0.25,) * 4), exact=True, took_s=took_s)
    faults: list[str] = []
    return Canary(golden, FACTS, 64, interval_s, lambda: None, faults.append), faults


def test_the_canary_runs_every_interval_and_more_rarely_for_a_slow_model() -> None:
    canary, faults = _canary()
    assert canary.next(0.0) is None
    assert canary.seconds_left(0.5) == pytest.approx(1.5)
    assert canary.next(2.0) is not None
    assert canary.next(2.1) is None, "one run at a time"
    assert not canary.is_urgent(3.0)
    assert canary.is_urgent(4.1)
    canary.take(
        [
            Outcome(
                sequence_id="c",
                position=0,
                token_ids=(17, 18, 19, 20),
                logprobs=(SampledLogprobs(-0.25),) * 4,
                finish_reason="length",
            )
        ],
        4.2,
    )
    assert canary.next(6.1) is None
    assert canary.next(6.2) is not None
    assert not faults
    assert _canary(took_s=0.5)[0].interval_s == 50.0


def test_a_wrong_result_stops_the_step_loop_and_answers_who_asked() -> None:
    canary, faults = _canary()
    canary.next(0.0)
    answer = canary.run_now()
    assert canary.seconds_left(0.0) == 0
    assert canary.next(0.1) is not None
    assert canary.is_urgent(0.1)
    canary.check()
    canary.take(
        [
            Outcome(
                sequence_id="c",
                position=0,
                token_ids=(17, 18, 19, 21),
                logprobs=(SampledLogprobs(-0.25),) * 4,
                finish_reason="length",
            )
        ],
        0.2,
    )
    assert answer.result(0) == canary.fault == faults[0]
    assert "token 21 instead of 20" in canary.fault
    with pytest.raises(WrongResultError):
        canary.check()
    canary.report("again")
    assert len(faults) == 1


def test_without_exact_results_only_a_repeated_difference_is_a_fault() -> None:
    canary, faults = _canary()
    canary.golden = replace(canary.golden, exact=False)
    wrong = Outcome(
        sequence_id="c",
        position=0,
        token_ids=(9, 18, 19, 20),
        logprobs=(SampledLogprobs(-0.25),) * 4,
        finish_reason="length",
    )
    right = Outcome(
        sequence_id="c",
        position=0,
        token_ids=(17, 18, 19, 20),
        logprobs=(SampledLogprobs(-0.25),) * 4,
        finish_reason="length",
    )
    canary.next(0.0)
    for now_s, outcome in ((2.0, wrong), (2.1, wrong), (2.2, right), (4.2, wrong), (4.3, wrong)):
        assert canary.next(now_s) is not None, "a run that differs is repeated at once"
        canary.take([outcome], now_s)
    assert not faults
    canary.next(4.4)
    canary.take([wrong], 4.4)
    assert len(faults) == 1


def test_an_engine_that_computes_a_sequence_in_two_ways_does_not_start() -> None:
    found = measure(Executor(CountingWorker()), LIMITS)
    assert found is not None
    assert found.value.token_ids == (16, 17, 18, 19)
    with pytest.raises(ServiceError, match="in two ways"):
        measure(Executor(CountingWorker(drift=1)), LIMITS)


def test_deterministic_mode_refuses_what_cannot_promise_it_and_what_does_not_keep_it() -> None:
    check_deterministic(Executor(CountingWorker()), LIMITS)
    variant = replace(FACTS, variant_because="sums are ordered by chance")
    with pytest.raises(SettingsError, match="--deterministic: sums are ordered by chance; leave the option out"):
        check_deterministic(Executor(CountingWorker(variant)), LIMITS)
    with pytest.raises(SettingsError, match="--deterministic: a sequence depends on what else is computed"):
        check_deterministic(Executor(CountingWorker(drift=1)), LIMITS)


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 4096, PORTION_BYTES + 13])
def test_one_changed_bit_changes_the_sum_wherever_it_is(num_bytes: int) -> None:
    memory = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
    sums = Checksums([WeightMemory("w", memory.ctypes.data, num_bytes)])
    assert not any(sums.check_next() for _ in range(sums.num_portions))
    assert sums.num_passes == 1
    for place in {0, num_bytes // 2, num_bytes - 1}:
        for bit in (0, 7):
            memory[place] ^= 1 << bit
            found = [told for _ in range(sums.num_portions) if (told := sums.check_next())]
            assert len(found) == 1
            assert found[0].startswith("w, bytes ")
            memory[place] ^= 1 << bit


def test_the_guard_finds_a_changed_weight_when_asked() -> None:
    memory = (ctypes.c_uint8 * 1024)()
    faults: list[str] = []

    def on_fault(fault: str) -> None:
        time.sleep(0.05)
        faults.append(fault)

    guard = WeightGuard(Checksums([WeightMemory("w", ctypes.addressof(memory), 1024)]), on_fault)
    guard.start()
    assert guard.run_now().result(60) == ""
    memory[100] ^= 1
    assert guard.run_now().result(60)
    assert len(faults) == 1, "the fault is known to the engine before the answer"
    guard.close()
    assert len(faults) == 1
    assert "the weights have changed in memory: w, bytes 0 to 1024" in faults[0]


@pytest.mark.parametrize("seed", range(8))
def test_the_canary_ends_whatever_requests_do_and_takes_nothing_from_them(seed: int) -> None:
    """Few blocks, so that sequences are preempted and swapped out; drafts, aborts, and clients with weights."""
    chance = random.Random(seed)
    facts = replace(FACTS, num_blocks=24, num_host_blocks=8 * (seed % 2))
    budget = chance.choice((4, 8, 64))
    limits = replace(LIMITS, max_num_seqs=4, max_num_batched_tokens=budget, enable_chunked_prefill=budget < 64)
    limits = replace(limits, num_speculative_tokens=3 * (seed % 3 == 0))
    core, worker = Core(limits, facts), CountingWorker(facts)
    golden: list[int] | None = None
    number = runs = 0
    for step in range(400):
        if chance.random() < 0.3 and step < 300:
            number += 1
            prompt = tuple(chance.randrange(1000) for _ in range(chance.randint(1, 40)))
            params = SamplingParams(max_tokens=chance.randint(1, 20), ignore_eos=True)
            core.add(
                SequenceSpec(
                    sequence_id=f"r{number}#1",
                    prompt_token_ids=prompt,
                    params=params,
                    client=chance.choice(("", "a", "b")),
                )
            )
        if chance.random() < 0.05 and core.sequences:
            core.abort(chance.choice([name for name in core.sequences if name.startswith("r")] or ["none"]))
        if step % 20 == 0 and not any(name.startswith("#") for name in core.sequences):
            spec = probe_spec(facts, step, core.checks.max_model_len)
            assert spec is not None
            core.add(spec)
        for outcome in _step(core, worker, urgent_canary=step % 20 > 10):
            assert outcome.sequence_id.startswith("r")
        if core.canary_outcomes and core.canary_outcomes[-1].finish_reason is not None:
            found = [token for one in core.canary_outcomes for token in one.token_ids]
            golden = golden or found
            assert found == golden
            runs += 1
            core.canary_outcomes.clear()
    assert runs >= 8
    while core.sequences:
        _step(core, worker)
    assert core.pool.num_free == facts.num_blocks
