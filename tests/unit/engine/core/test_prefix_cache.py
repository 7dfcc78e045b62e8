"""What is found again, what is hashed, and that nothing is found too early or by the wrong tenant."""

import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.kv import prefix_cache
from antiphon.shared import blocks
from antiphon.shared.codec import pack_ids
from tests.unit.engine.core.factories import answer, joined, make_core, prompt_of, shares, spec, step


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """Parent and packed tokens of every block that the core hashes."""
    seen: list[tuple[bytes, bytes]] = []

    def child_hash(parent: bytes, packed_tokens: bytes) -> bytes:
        seen.append((parent, packed_tokens))
        return blocks.child_hash(parent, packed_tokens)

    monkeypatch.setattr(prefix_cache, "child_hash", child_hash)
    return seen


def run_out(core: Core) -> None:
    while core.sequences:
        step(core)


def cached_tokens_of(core: Core, sequence_id: str) -> int:
    _, outcomes = step(core)
    return next(each.num_cached_tokens for each in outcomes if each.sequence_id == sequence_id)


@pytest.mark.spec("S-SRV-046")
def test_a_shared_prefix_is_reused_block_by_block_and_reported() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(10), max_tokens=1))
    run_out(core)
    core.add(spec("b", (*prompt_of(9), 999, 998), max_tokens=1))
    plan, outcomes = step(core)
    assert joined(plan)["b"][:2] == (0, 1)
    assert shares(plan) == [(0, 8, 3, True)]
    assert outcomes[0].num_cached_tokens == 8
    counters = core.counters()
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (10 + 11, 8)


@pytest.mark.spec("S-SRV-046")
def test_without_prefix_caching_nothing_is_reused_or_hashed(hashed: list[tuple[bytes, bytes]]) -> None:
    core = make_core(caching=False)
    for sequence_id in ("a", "b"):
        core.add(spec(sequence_id, prompt_of(12), max_tokens=3))
        assert cached_tokens_of(core, sequence_id) == 0
        run_out(core)
    assert hashed == []
    assert core.pool.num_named == 0
    assert core.counters().prefix_cache_queries == 0


@pytest.mark.parametrize(("length", "cached"), [(7, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_at_least_one_token_is_left_to_compute(length: int, cached: int) -> None:
    core = make_core()
    core.add(spec("a", prompt_of(20), max_tokens=1))
    run_out(core)
    core.add(spec("b", prompt_of(length), max_tokens=1))
    assert cached_tokens_of(core, "b") == cached


def test_output_tokens_are_cached_as_well_but_not_the_last_one_which_is_never_computed() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(6), max_tokens=3))
    run_out(core)
    core.add(spec("b", (*prompt_of(6), 7, 7, 7, 5), max_tokens=1))
    assert cached_tokens_of(core, "b") == 8
    core.add(spec("c", (*prompt_of(6), 7, 7, 7, 5, 5, 5, 5), max_tokens=1))
    assert cached_tokens_of(core, "c") == 8


@pytest.mark.matrix("S-11")
def test_another_salt_finds_nothing() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(12), max_tokens=1, salt=b"one"))
    run_out(core)
    core.add(spec("b", prompt_of(12), max_tokens=1, salt=b"two"))
    assert cached_tokens_of(core, "b") == 0
    run_out(core)
    core.add(spec("c", prompt_of(12), max_tokens=1, salt=b"one"))
    assert cached_tokens_of(core, "c") == 8


def test_the_names_are_the_hashes_that_every_service_computes() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(12), max_tokens=1, salt=b"salt"))
    step(core)
    expected = blocks.split_hashes(blocks.chain_hashes(pack_ids(prompt_of(12)), 4, b"salt"))
    assert [core.pool.hash_of(block) for block in range(4)] == [*expected, None]


def test_hashes_that_come_with_a_sequence_are_not_computed_again(hashed: list[tuple[bytes, bytes]]) -> None:
    core = make_core()
    prompt = prompt_of(12)
    chain = tuple(blocks.split_hashes(blocks.chain_hashes(pack_ids(prompt), 4)))
    core.add(spec("a", prompt, max_tokens=1, hashes=chain))
    run_out(core)
    core.add(spec("b", prompt, max_tokens=1, hashes=chain[:2]))
    assert cached_tokens_of(core, "b") == 8
    assert hashed == [(chain[1], pack_ids(prompt[8:12]))]


def test_more_hashes_than_full_blocks_are_ignored() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(6), max_tokens=8, hashes=(b"x" * 16, b"y" * 16, b"z" * 16)))
    run_out(core)
    assert core.pool.find(b"x" * 16) is not None
    assert core.pool.find(b"y" * 16) is None


def test_every_block_is_hashed_once_as_it_fills(hashed: list[tuple[bytes, bytes]]) -> None:
    core = make_core()
    core.add(spec("a", prompt_of(5), max_tokens=9))
    step(core)
    assert len(hashed) == 1
    run_out(core)
    tokens = (*prompt_of(5), *(7,) * 9)
    assert [packed for _, packed in hashed] == [pack_ids(tokens[start : start + 4]) for start in (0, 4, 8)]


def test_a_lookup_hashes_no_further_than_the_first_miss(hashed: list[tuple[bytes, bytes]]) -> None:
    core = make_core()
    core.add(spec("a", prompt_of(40), max_tokens=1))
    core.schedule()
    assert len(hashed) == 1


def test_a_block_is_not_found_before_the_step_that_computes_it_is_applied() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(12)))
    plan = core.schedule()
    core.add(spec("b", prompt_of(12)))
    ahead = core.schedule()
    assert set(joined(ahead)["b"]).isdisjoint(joined(plan)["a"])
    core.apply(plan, answer(plan))
    core.add(spec("c", prompt_of(12)))
    assert joined(core.schedule())["c"][:2] == joined(plan)["a"][:2]
    invariants.check(core)


def test_equal_blocks_computed_in_one_step_stay_apart_and_only_the_first_is_named() -> None:
    core = make_core()
    core.add(spec("a", prompt_of(9)))
    core.add(spec("b", prompt_of(9)))
    plan, _ = step(core)
    assert joined(plan) == {"a": (0, 1, 2), "b": (3, 4, 5)}
    assert [core.pool.hash_of(block) is not None for block in range(6)] == [True, True, False, False, False, False]
    core.abort("b")
    assert list(core.pool.eviction_order())[:3] == [3, 4, 5]
    invariants.check(core)


def test_a_shared_block_outlives_the_sequence_that_computed_it() -> None:
    core = make_core(num_blocks=6)
    core.add(spec("a", prompt_of(9), max_tokens=2))
    step(core)
    core.add(spec("b", prompt_of(9), max_tokens=9))
    step(core)
    assert core.sequences.keys() == {"b"}
    assert core.pool.ref_count(0) == core.pool.ref_count(1) == 1
    run_out(core)
    assert core.pool.num_free == 6


def test_an_evicted_tail_leaves_the_head_of_the_prefix_usable() -> None:
    core = make_core(num_blocks=5)
    core.add(spec("a", prompt_of(17), max_tokens=1))
    run_out(core)
    assert list(core.pool.eviction_order()) == [4, 3, 2, 1, 0]
    core.add(spec("b", prompt_of(9, 500), max_tokens=1))
    run_out(core)
    core.add(spec("c", prompt_of(17), max_tokens=1))
    assert cached_tokens_of(core, "c") == 8


def test_a_preempted_sequence_finds_its_own_blocks_again_without_hashing(hashed: list[tuple[bytes, bytes]]) -> None:
    core = make_core(num_blocks=6)
    core.add(spec("a", prompt_of(8), max_tokens=6))
    core.add(spec("b", prompt_of(11, 500), max_tokens=6, arrival=1))
    step(core)
    step(core)
    plan, _ = step(core)
    assert core.counters().preemptions == 1
    assert len(plan.scheduled) == 1
    while "b" not in joined(plan):
        plan, _ = step(core)
    assert plan.scheduled[-1].start == 8, "its third block had to make room for 'a'"
    run_out(core)
    assert len(hashed) == len(set(hashed))
    assert core.counters().prefix_cache_hits == 0, "a sequence counts once, when it first runs"
