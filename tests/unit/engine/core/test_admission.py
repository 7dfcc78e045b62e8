"""When waiting sequences join beside running ones: the reserve of blocks and the scheduler's delay."""

import pytest

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.policy.delay import AdmissionDelay
from tests.unit.engine.core.factories import answer, joined, make_core, prompt_of, spec, step


def add(core: Core, *lengths: int, max_tokens: int = 50) -> None:
    for number, length in enumerate(lengths):
        name = chr(ord("a") + len(core.sequences))
        core.add(spec(name, prompt_of(length, 100 * (number + 1)), max_tokens=max_tokens))


@pytest.mark.spec("S-SRV-043")
def test_new_sequences_leave_the_rest_of_the_blocks_to_those_that_run() -> None:
    core = make_core(num_blocks=8, kv_cache_ratio=0.5)
    add(core, 8, 8, 4, max_tokens=3)
    assert list(joined(step(core)[0])) == ["a", "b"]
    assert list(joined(step(core)[0])) == []
    step(core)
    assert list(joined(step(core)[0])) == ["c"]


@pytest.mark.spec("S-SRV-043")
@pytest.mark.parametrize("ratio", [0.0, 0.25])
def test_a_sequence_that_fits_alone_runs_whatever_the_ratio(ratio: float) -> None:
    core = make_core(num_blocks=8, kv_cache_ratio=ratio)
    add(core, 30, 30, max_tokens=1)
    assert list(joined(step(core)[0])) == ["a"]
    assert list(joined(step(core)[0])) == ["b"]
    assert not core.sequences


@pytest.mark.spec("S-SRV-043")
def test_without_a_ratio_sequences_join_while_there_are_blocks() -> None:
    core = make_core(num_blocks=8)
    add(core, 12, 12, 8)
    assert list(joined(step(core)[0])) == ["a", "b", "c"]


def test_without_chunked_prefill_a_long_head_leaves_the_reserve_too() -> None:
    core = make_core(num_blocks=8, budget=16, chunked=False, caching=False, kv_cache_ratio=0.5)
    add(core, 3, 16, max_tokens=3)
    assert [list(joined(step(core)[0])) for _ in range(4)] == [["a"], [], [], ["b"]]


@pytest.mark.spec("S-SRV-054")
def test_a_prompt_waits_a_multiple_of_the_last_prompts_time_while_others_decode() -> None:
    core = make_core(scheduler_delay_factor=0.5)
    core.add(spec("a", prompt_of(8)))
    plan = core.schedule(10.0)
    core.apply(plan, answer(plan), 14.0)
    core.add(spec("b", prompt_of(8, 500)))
    names = []
    for now_s in (14.0, 15.0, 15.9, 16.0):
        plan = core.schedule(now_s)
        names.append(list(joined(plan)))
        core.apply(plan, answer(plan), now_s)
    assert names == [[], [], [], ["b"]]


@pytest.mark.spec("S-SRV-054")
def test_nobody_waits_while_nothing_runs_or_without_a_factor() -> None:
    for factor in (0.0, 100.0):
        core = make_core(scheduler_delay_factor=factor)
        for number in range(3):
            core.add(spec(f"s{number}", prompt_of(8, 100 * number), max_tokens=1))
            plan = core.schedule(5.0 * number)
            assert list(joined(plan)) == [f"s{number}"]
            core.apply(plan, answer(plan), 5.0 * number + 4.0)


def test_only_steps_that_let_somebody_join_set_the_delay() -> None:
    delay = AdmissionDelay(2.0)
    delay.joined(1, 0.0)
    delay.step_ended(1, 3.0)
    delay.step_ended(2, 50.0)
    assert not delay.passed(100.0)
    assert not delay.passed(105.9)
    assert delay.passed(106.0)
