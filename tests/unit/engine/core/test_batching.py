"""Dynamic batches: new sequences gather until there are enough of them or until they have waited long enough."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.plan import CoreLimits, EngineFacts, StepPlan, StepResult
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.executor import Executor
from antiphon.services.engine.warmup import warm_up
from tests.unit.engine.core.factories import answer, joined, make_core, prompt_of, spec

FACTS = EngineFacts(num_blocks=64, block_size=4, max_model_len=100, vocab_size=1000)


def batching(size: int, wait_s: float, **others: Any) -> Core:
    return make_core(num_blocks=64, max_num_seqs=8, max_batch_size=size, batch_wait_timeout=wait_s, **others)


def add(core: Core, *names: str, max_tokens: int = 50) -> None:
    for name in names:
        core.add(spec(name, prompt_of(6, 100 * (1 + ord(name) - ord("a"))), max_tokens=max_tokens))


def step_at(core: Core, now_s: float) -> list[str]:
    """Who joins."""
    plan = core.schedule(now_s)
    invariants.check(core)
    core.apply(plan, answer(plan), now_s)
    return list(joined(plan))


@pytest.mark.spec("S-SRV-059", "S-SRV-060")
def test_a_batch_starts_when_it_is_full() -> None:
    core = batching(3, 10.0)
    add(core, "a", "b")
    assert step_at(core, 0.0) == []
    add(core, "c")
    assert step_at(core, 1.0) == ["a", "b", "c"]


@pytest.mark.spec("S-SRV-060")
def test_a_batch_that_does_not_fill_starts_after_the_wait_of_its_first() -> None:
    core = batching(3, 2.0)
    add(core, "a")
    assert step_at(core, 5.0) == []
    assert core.scheduler.seconds_to_batch(5.0) == 2.0
    add(core, "b")
    assert step_at(core, 6.5) == []
    assert core.scheduler.seconds_to_batch(6.5) == 0.5
    assert step_at(core, 7.0) == ["a", "b"]
    assert core.scheduler.seconds_to_batch(7.0) == math.inf


@pytest.mark.spec("S-SRV-059")
def test_no_more_than_a_batch_joins_and_the_rest_gathers_anew() -> None:
    core = batching(2, 3.0)
    add(core, "a", "b", "c", "d", "e")
    assert step_at(core, 0.0) == ["a", "b"]
    assert step_at(core, 0.1) == ["c", "d"]
    assert step_at(core, 0.2) == []
    assert step_at(core, 3.1) == []
    assert step_at(core, 3.2) == ["e"]


@pytest.mark.spec("S-SRV-060")
def test_without_a_wait_nobody_gathers() -> None:
    core = batching(16, 0.0)
    add(core, "a")
    assert step_at(core, 0.0) == ["a"]


def test_running_sequences_go_on_while_others_gather() -> None:
    core = batching(2, 5.0)
    add(core, "a", "b", max_tokens=3)
    step_at(core, 0.0)
    add(core, "c")
    for now_s in (1.0, 2.0):
        plan = core.schedule(now_s)
        assert [share.num_tokens for share in plan.scheduled] == [1, 1]
        core.apply(plan, answer(plan), now_s)
    assert core.schedule(3.0).empty


def test_a_wait_ends_with_the_last_of_those_who_waited() -> None:
    core = batching(2, 1.0)
    add(core, "a")
    step_at(core, 0.0)
    core.abort("a")
    step_at(core, 0.5)
    add(core, "b")
    assert step_at(core, 20.0) == []
    assert step_at(core, 21.0) == ["b"]


def test_a_preempted_sequence_waits_for_no_batch() -> None:
    core = make_core(num_blocks=4, max_num_seqs=4, max_batch_size=2, batch_wait_timeout=100.0, caching=False)
    core.add(spec("a", prompt_of(7), max_tokens=6))
    core.add(spec("b", prompt_of(7, 500), max_tokens=6))
    names = [step_at(core, 0.1 * index) for index in range(20)]
    assert core.tally.preemptions > 0
    assert names[0] == ["a", "b"]
    assert ["b"] in names[1:]
    assert not core.sequences


@pytest.mark.spec("S-SRV-059", "S-SRV-060")
@given(
    size=st.integers(1, 5),
    wait_s=st.sampled_from([0.0, 0.5, 2.0]),
    arrivals=st.lists(st.integers(0, 3), min_size=1, max_size=25),
)
def test_batches_are_never_too_large_and_no_wait_is_too_long(size: int, wait_s: float, arrivals: list[int]) -> None:
    """A clock of half seconds; rows and blocks enough for everybody, so that only gathering holds anybody back."""
    core = make_core(num_blocks=512, max_num_seqs=128, budget=4096, max_batch_size=size, batch_wait_timeout=wait_s)
    waiting: list[str] = []
    free_since_s = 0.0
    for tick, count in enumerate(arrivals):
        now_s = 0.5 * tick
        for index in range(count):
            name = f"{tick}/{index}"
            core.add(spec(name, prompt_of(3), max_tokens=2))
            free_since_s = free_since_s if waiting else now_s
            waiting.append(name)
        names = step_at(core, now_s)
        assert names == waiting[: len(names)]
        assert len(names) <= size
        due = len(waiting) >= size or (bool(waiting) and now_s - free_since_s >= wait_s)
        assert bool(names) == due
        del waiting[: len(names)]
        free_since_s = now_s + 0.5 if names else free_since_s


class TickingWorker:
    def facts(self) -> EngineFacts:
        return FACTS

    def run(self, plan: StepPlan) -> StepResult:
        return answer(plan)

    def close(self) -> None:
        pass


@pytest.mark.spec("S-SRV-060")
def test_the_step_loop_wakes_when_the_wait_is_over() -> None:
    reports: list[Any] = []
    limits = CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, max_batch_size=4, batch_wait_timeout=0.05)
    engine = Engine.of_worker(TickingWorker(), limits, reports.append)
    engine.add(spec("a", prompt_of(3), max_tokens=1))
    while not engine.step():
        # Without the batch's own time it would be this long, and longer than the test may take.
        engine.wait(300.0)
    assert reports[0].joined == ("a",)


@pytest.mark.spec("S-SRV-061")
def test_a_warm_up_gathers_nothing() -> None:
    plain, gathering = (
        CoreLimits(max_num_seqs=4, max_num_batched_tokens=64),
        CoreLimits(max_num_seqs=4, max_num_batched_tokens=64, max_batch_size=16, batch_wait_timeout=60.0),
    )
    assert warm_up(Executor(TickingWorker()), gathering) == warm_up(Executor(TickingWorker()), plain) > 1
