"""Sequences whose KV comes from another engine, and prompts that are computed for another engine."""

from dataclasses import replace

import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.kv.kv_transfer import KvLoad, KvLoaded, KvReleased, KvSave
from antiphon.shared.blocks import chain_hashes, child_hash, root_hash, split_hashes
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.limits import KV_TRANSFER_TOKENS_MIN
from antiphon.shared.messages import KvSource
from tests.unit.engine.core.factories import answer, make_core, prompt_of, shares, spec, step

PROMPT = prompt_of(22)
SOURCE = KvSource("transfer", "127.0.0.1:1")


def loading(core: Core, name: str = "a", prompt: tuple[int, ...] = PROMPT, source: KvSource = SOURCE, **others) -> None:
    one = spec(name, prompt, **others)
    core.add(replace(one, kv_source=source))
    invariants.check(core)


def saving(core: Core, name: str = "p", prompt: tuple[int, ...] = PROMPT, **others) -> None:
    one = spec(name, prompt, max_tokens=1, **others)
    core.add(replace(one, kv_transfer_id="transfer"))
    invariants.check(core)


def names(prompt: tuple[int, ...] = PROMPT) -> list[bytes]:
    """The hashes of all blocks, of the partly filled last one too."""
    full = split_hashes(chain_hashes(pack_ids(prompt), 4))
    rest = prompt[4 * len(full) :]
    return [*full, child_hash(full[-1] if full else root_hash(), pack_ids(rest))] if rest else full


def the_load(core: Core) -> KvLoad:
    (load,) = core.transfers.plan_meta().loads
    return load


def test_a_sequence_waits_for_its_kv_and_then_computes_one_token() -> None:
    core = make_core(num_host_blocks=16)
    loading(core)
    assert core.schedule().empty
    load = the_load(core)
    assert (load.transfer_id, load.address, load.num_tokens) == ("transfer", "127.0.0.1:1", 21)
    assert list(load.hashes) == names()
    assert core.load().num_waiting == 1
    core.transferred(KvLoaded("transfer", 6))
    plan, outcomes = step(core, 50)
    assert shares(plan) == [(0, 21, 1, True)]
    assert [host for host, _ in plan.swap_in] == list(load.host_blocks)
    assert outcomes[0].token_ids == (50,)
    assert outcomes[0].num_cached_tokens == 0
    counters = core.counters()
    assert (counters.kv_loads, counters.kv_failed_loads, counters.kv_loaded_tokens) == (1, 0, 21)


@pytest.mark.parametrize(("received", "start"), [(0, 0), (1, 4), (5, 20)])
def test_what_a_transfer_does_not_bring_is_computed(received: int, start: int) -> None:
    core = make_core(num_host_blocks=16)
    loading(core)
    core.schedule()
    core.transferred(KvLoaded("transfer", received))
    plan, _ = step(core)
    assert shares(plan) == [(0, start, 22 - start, True)]
    assert core.counters().kv_failed_loads == 1
    assert core.swap.pool.num_free == 16


def test_cached_blocks_are_not_loaded() -> None:
    core = make_core(num_host_blocks=16)
    core.add(spec("first", PROMPT[:5], max_tokens=1))
    step(core)
    loading(core)
    load = the_load(core)
    assert list(load.hashes) == names()[1:]
    core.transferred(KvLoaded("transfer", 5))
    plan, outcomes = step(core)
    assert shares(plan) == [(0, 21, 1, True)]
    assert outcomes[0].num_cached_tokens == 4


def test_loaded_blocks_are_of_no_use_if_the_cache_has_lost_those_before_them() -> None:
    core = make_core(num_blocks=8, num_host_blocks=16)
    core.add(spec("first", PROMPT[:5], max_tokens=1))
    step(core)
    loading(core)
    the_load(core)
    core.add(spec("other", prompt_of(28, 300), max_tokens=5))
    for _ in range(5):
        step(core)
    core.transferred(KvLoaded("transfer", 5))
    plan, _ = step(core)
    assert shares(plan) == [(0, 0, 22, True)]
    assert core.swap.pool.num_free == 16


def test_few_missing_tokens_are_not_loaded() -> None:
    core = make_core(num_host_blocks=16)
    loading(core, prompt=prompt_of(KV_TRANSFER_TOKENS_MIN))
    assert not core.transfers.plan_meta()
    plan, _ = step(core)
    assert plan.num_tokens == KV_TRANSFER_TOKENS_MIN


def test_without_host_blocks_the_prompt_is_computed() -> None:
    core = make_core(num_host_blocks=5)
    loading(core)
    assert not core.transfers.plan_meta()
    plan, _ = step(core)
    assert plan.num_tokens == 22
    assert core.counters().kv_failed_loads == 1


def test_log_probabilities_of_the_prompt_are_computed() -> None:
    core = make_core(num_host_blocks=16)
    loading(core, prompt_logprobs=0)
    assert not core.transfers.plan_meta()


def test_host_blocks_of_an_aborted_sequence_are_kept_until_the_load_has_ended() -> None:
    core = make_core(num_host_blocks=16)
    loading(core)
    the_load(core)
    assert core.abort("a")
    invariants.check(core)
    assert core.transfers.plan_meta().cancelled == ("transfer",)
    assert core.swap.pool.num_free == 10
    core.transferred(KvLoaded("transfer", 2))
    invariants.check_idle(core, 0.0)
    assert core.swap.pool.num_free == 16


def test_choices_of_one_prompt_share_a_load() -> None:
    core = make_core(num_host_blocks=16)
    loading(core, "a", sequence_group="f")
    loading(core, "b", sequence_group="f", arrival=1)
    assert len(core.transfers.plan_meta().loads) == 1
    core.transferred(KvLoaded("transfer", 6))
    for _ in range(2):
        step(core)
    assert core.load().num_running == 2
    assert core.counters().kv_loads == 1


def test_the_load_goes_to_a_choice_that_is_left() -> None:
    core = make_core(num_host_blocks=16)
    loading(core, "a", sequence_group="f")
    loading(core, "b", sequence_group="f", arrival=1)
    core.abort("a")
    assert not core.transfers.plan_meta().cancelled
    core.transferred(KvLoaded("transfer", 6))
    plan, _ = step(core)
    assert shares(plan) == [(0, 21, 1, True)]


def test_a_sequence_that_is_preempted_after_its_load_comes_back() -> None:
    core = make_core(num_blocks=9, num_host_blocks=16)
    core.add(spec("old", prompt_of(8, 300), max_tokens=20))
    step(core)
    loading(core, arrival=1)
    the_load(core)
    core.transferred(KvLoaded("transfer", 6))
    tokens: list[int] = []
    for number in range(30):
        _, outcomes = step(core, 50 + number)
        tokens += [token for each in outcomes if each.sequence_id == "a" for token in each.token_ids]
        if core.counters().preemptions:
            break
    assert core.counters().preemptions == 1
    while "a" in core:
        step(core)
    assert core.swap.pool.num_free == 16


# --- sending ----------------------------------------------------------------------------------------------------------


def saves(core: Core) -> list[KvSave]:
    return list(core.transfers.plan_meta().saves)


def test_blocks_are_passed_on_as_they_are_computed() -> None:
    core = make_core(budget=10)
    saving(core)
    assert core.transfers.plan_meta().opened == ("transfer",)
    held: list[int] = []
    for given, complete in ((names()[:2], False), (names()[2:5], False), (names()[5:], True)):
        step(core)
        (save,) = saves(core)
        assert list(save.hashes) == given
        assert save.complete == complete
        held += save.block_ids
    assert save.num_tokens_in_last == 2
    assert "p" not in core
    assert core.pool.num_free == 32 - 6
    invariants.check_idle(core, 0.0)
    core.transferred(KvReleased(tuple(held)))
    invariants.check(core)
    assert core.pool.num_free == 32
    assert core.counters().kv_saved_tokens == 22


def test_cached_blocks_are_passed_on_too() -> None:
    core = make_core()
    core.add(spec("first", PROMPT, max_tokens=1))
    step(core)
    saving(core)
    step(core)
    (save,) = saves(core)
    assert list(save.hashes) == names()
    assert save.complete


@pytest.mark.parametrize("length", [20, 21, 24])
def test_sender_and_receiver_name_the_blocks_alike(length: int) -> None:
    sender, receiver = make_core(caching=False), make_core(num_host_blocks=16, caching=False)
    saving(sender, prompt=prompt_of(length))
    step(sender)
    loading(receiver, prompt=prompt_of(length))
    (save,) = saves(sender)
    assert set(the_load(receiver).hashes) <= set(save.hashes)


def test_a_transfer_is_dropped_with_its_sequence() -> None:
    core = make_core(budget=10)
    saving(core)
    step(core)
    (save,) = saves(core)
    core.abort("p")
    assert core.transfers.plan_meta().dropped == ("transfer",)
    assert core.pool.num_free == 30
    core.transferred(KvReleased(save.block_ids))
    assert core.pool.num_free == 32


def test_a_sequence_waits_for_blocks_that_are_held_for_another_engine() -> None:
    core = make_core(num_blocks=8)
    saving(core)
    step(core)
    (save,) = saves(core)
    core.add(spec("b", prompt_of(16, 300), max_tokens=1))
    assert core.schedule().empty
    invariants.check_idle(core, 0.0)
    core.transferred(KvReleased(save.block_ids))
    plan, _ = step(core)
    assert plan.num_tokens == 16


def test_a_copy_to_the_host_that_nobody_needs_does_not_overwrite_a_load() -> None:
    core = make_core(num_blocks=8, num_host_blocks=6)
    for number in range(2):
        core.add(spec(f"s{number}", prompt_of(12, 300 + 100 * number), max_tokens=12, arrival=number))
    while not core.counters().preemptions:
        core.apply(plan := core.schedule(), answer(plan))
        if core.counters().swapped_out_blocks:
            break
    core.abort("s1")
    loading(core, prompt=prompt_of(21))
    load = the_load(core)
    plan = core.schedule()
    assert not {host for _, host in plan.swap_out} & set(load.host_blocks)


def test_a_prompt_for_another_engine_has_one_output() -> None:
    core = make_core()
    one = spec("p", PROMPT, max_tokens=2)
    with pytest.raises(ServiceError):
        core.add(replace(one, kv_transfer_id="transfer"))
