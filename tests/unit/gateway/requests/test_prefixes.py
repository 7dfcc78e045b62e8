"""What a gateway knows of prefix caches, and how the router uses it."""

from antiphon.services.gateway.guests.prefix_caches.guest import followed
from antiphon.services.gateway.path.prefixes import KnownBlocks
from antiphon.services.gateway.path.router import Router
from antiphon.shared import limits
from tests.unit.gateway.requests.test_router import BLOCKS, engine

NUM_TOKENS = 16 * len(BLOCKS) + 4


def following(*names: str) -> tuple[Router, list[KnownBlocks]]:
    router, known = Router(), [KnownBlocks() for _ in names]
    for name, one in zip(names, known, strict=True):
        router.follow((name, "instance_id"), one)
    return router, known


def test_the_engine_that_has_the_prefix_is_chosen_though_this_gateway_never_sent_it():
    router, (_, second) = following("a", "b")
    second.present.update(BLOCKS)
    first, other = engine("a"), engine("b", num_running=3)
    assert router.choose_engine([first, other], "m", NUM_TOKENS, BLOCKS) is other
    second.present.clear()  # evicted
    assert router.choose_engine([first, other], "m", NUM_TOKENS, BLOCKS) is first


def test_a_prompt_that_was_just_sent_is_expected_until_the_second_heartbeat_after_its_end():
    router, (known,) = following("a")
    beat = engine("a")
    router.record_dispatch(beat, "s0", NUM_TOKENS, BLOCKS)
    assert router.num_missing_tokens(beat, NUM_TOKENS, BLOCKS) == 4
    router.record_answer(("a", "instance_id"), "s0", accepted=True)
    router.record_end(("a", "instance_id"), "s0")
    for sequence, missing in ((2, 4), (3, NUM_TOKENS)):
        beat = engine("a", sequence)
        router.credit(beat)
        assert router.num_missing_tokens(beat, NUM_TOKENS, BLOCKS) == missing
    known.present.update(BLOCKS[:3])
    assert router.num_missing_tokens(beat, NUM_TOKENS, BLOCKS) == NUM_TOKENS - 3 * 16


def test_a_prompt_that_was_refused_or_not_answered_is_not_expected_for_ever():
    router, (known,) = following("a")
    beat = engine("a")
    router.record_dispatch(beat, "s0", NUM_TOKENS, BLOCKS)
    router.record_answer(("a", "instance_id"), "s0", accepted=False)
    router.record_dispatch(beat, "s1", NUM_TOKENS, BLOCKS)
    router.record_silence(("a", "instance_id"), "s1")
    known.heartbeat()
    known.heartbeat()
    assert known.overlap(BLOCKS) == 0


def test_two_sequences_that_bring_the_same_blocks_are_counted():
    known = KnownBlocks()
    known.sent("s0", BLOCKS)
    known.sent("s1", BLOCKS)
    known.ended("s0")
    known.heartbeat()
    known.heartbeat()
    assert known.overlap(BLOCKS) == len(BLOCKS)
    known.ended("s1")
    known.heartbeat()
    known.heartbeat()
    assert known.overlap(BLOCKS) == 0


def test_only_missing_tokens_wait_at_a_followed_engine_so_that_a_hot_prefix_stays():
    router, (known, _) = following("a", "b")
    known.present.update(BLOCKS)
    hot, cold = engine("a", num_waiting_tokens=8 * NUM_TOKENS), engine("b")
    for number in range(64):  # the latest prompts there were cached
        known.sent(f"old{number}", BLOCKS)
    assert router.choose_engine([hot, cold], "m", NUM_TOKENS, BLOCKS) is hot
    busier = engine("a", 2, num_waiting_tokens=10_000 * NUM_TOKENS)
    assert router.choose_engine([busier, cold], "m", NUM_TOKENS, BLOCKS) is cold


def test_an_engine_that_is_no_longer_followed_is_estimated_again():
    router, (known,) = following("a")
    known.present.update(BLOCKS)
    router.follow(("a", "instance_id"), None)
    assert router.num_missing_tokens(engine("a"), NUM_TOKENS, BLOCKS) == NUM_TOKENS


def test_engines_are_followed_where_at_least_two_can_take_the_same_work(monkeypatch):
    pair = [engine("a"), engine("b")]
    alone = [engine("c", model="other"), engine("p", role="prefill"), engine("d", state="draining")]
    assert [one.id for one in followed([*pair, *alone])] == ["a", "b"]
    assert followed(alone) == {}
    monkeypatch.setattr(limits, "BLOCKS_FOLLOWED_MAX", 150)  # each has 100
    assert followed(pair) == {}
