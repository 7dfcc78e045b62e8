"""Where sequences go: load, prefix overlap, and what was sent since the last heartbeat."""

from typing import Any

from antiphon.services.gateway.path.prefixes import PrefixIndex
from antiphon.services.gateway.path.router import SHARE, Router, served_models
from antiphon.shared import limits
from antiphon.shared.messages import Heartbeat, ServiceState, StreamStatus
from tests.support.heartbeats import engine_status, heartbeat


def engine(name: str, sequence: int = 1, model: str = "m", state: ServiceState = "ready", **status: Any) -> Heartbeat:
    facts = engine_status(model, **{"credits": 16, **status})
    return heartbeat("engine", name, "instance_id", facts, state=state, sequence=sequence)


def detokenizer(name: str, streams: int = 0, model: str = "m") -> Heartbeat:
    return heartbeat("detokenizer", name, "instance_id", StreamStatus(streams, model=model))


BLOCKS = list(range(1, 9))


def test_the_least_loaded_engine_is_chosen():
    busy, idle = engine("a", num_running=4), engine("b")
    assert Router().choose_engine([busy, idle], "m", 10, []) is idle


def test_draining_engines_and_other_models_are_left_out():
    router = Router()
    assert router.choose_engine([engine("a", state="draining"), engine("b", model="x")], "m", 10, []) is None


def test_what_was_sent_since_the_heartbeat_counts():
    router, first, second = Router(), engine("a"), engine("b")
    chosen = []
    for number in range(4):
        pick = router.choose_engine([first, second], "m", 10, [])
        assert pick is not None
        router.record_dispatch(pick, f"s{number}", 10, [])
        chosen.append(pick.id)
    assert chosen == ["a", "b", "a", "b"]
    assert router.choose_engine([engine("a", 2), engine("b", 2)], "m", 10, []) is not None


def test_a_shared_prefix_draws_a_prompt_to_the_engine_that_has_it():
    router, first, second = Router(), engine("a"), engine("b")
    router.record_dispatch(second, "s0", 128, BLOCKS)
    fresh = [engine("a", 2), engine("b", 2)]
    pick = router.choose_engine(fresh, "m", 130, BLOCKS)
    assert pick is not None
    assert pick.id == "b"
    assert first.id == "a"


def test_the_prefix_index_forgets_the_oldest():
    index = PrefixIndex(2)
    index.add(BLOCKS[:3])
    assert index.overlap(BLOCKS[:3]) == 0
    assert index.overlap(BLOCKS[1:3]) == 2


def test_streams_spread_over_detokenizers_at_once():
    router, members = Router(), [detokenizer("a"), detokenizer("b")]
    for number, expected in enumerate(("a", "b", "a")):
        pick = router.choose_detokenizer(members, "m")
        assert pick is not None
        assert pick.id == expected
        router.stream_opened((pick.id, pick.instance_id), f"s{number}")
    for name in ("s0", "s0", "s2"):
        router.stream_closed(("a", "instance_id"), name)
    pick = router.choose_detokenizer(members, "m", {("a", "instance_id")})
    assert pick is not None
    assert pick.id == "b"


def test_a_stream_goes_to_a_detokenizer_of_its_model_however_many_streams_that_one_has():
    router, members = Router(), [detokenizer("a", model="other"), detokenizer("b", 9)]
    assert router.choose_detokenizer(members, "m") is members[1]
    assert router.choose_detokenizer(members, "none") is None


ENGINE = ("a", "instance_id")


def send(router: Router, beat: Heartbeat, *names: str) -> None:
    for name in names:
        router.record_dispatch(beat, name, 10, [])


def answer(router: Router, *names: str) -> None:
    for name in names:
        router.record_answer(ENGINE, name, accepted=True)


def test_an_engine_without_credit_gets_nothing():
    router, full = Router(), engine("a", credits=2)
    send(router, full, "s0", "s1")
    assert router.credit(full) == 0
    assert router.choose_engine([full], "m", 10, []) is None
    other = engine("b", num_running=8, credits=1)
    assert router.choose_engine([full, other], "m", 10, []) is other


def test_a_sequence_that_ends_gives_its_credit_back_at_once_and_once():
    router, beat = Router(), engine("a", credits=2)
    send(router, beat, "s0", "s1")
    router.record_end(ENGINE, "s0")
    router.record_end(ENGINE, "s0")
    assert router.credit(beat) == 1


def test_a_heartbeat_may_not_count_what_the_engine_has_not_answered():
    router = Router()
    send(router, engine("a", credits=4), "s0", "s1", "s2")
    answer(router, "s0", "s1")
    assert router.credit(engine("a", 2, credits=2)) == 1
    answer(router, "s2")
    assert router.credit(engine("a", 3, credits=1)) == 1


def test_a_gateway_that_finds_an_engine_full_of_others_sequences_still_gets_its_share():
    router, full = Router(), engine("a", credits=-20)
    assert router.credit(full) == 8 // SHARE
    send(router, full, "s0")
    assert router.credit(full) == 0


def test_an_engine_that_refused_gets_nothing_until_its_next_heartbeat():
    router, beat = Router(), engine("a")
    send(router, beat, "s0")
    router.record_answer(ENGINE, "s0", accepted=False)
    assert router.credit(beat) == 0
    assert router.can_take([beat], "m")
    assert router.credit(engine("a", 2)) == 16


def test_an_engine_that_does_not_answer_gets_one_sequence_a_heartbeat_until_it_does():
    router = Router()
    send(router, engine("a"), "s0", "s1")
    router.record_silence(ENGINE, "s0")
    router.record_silence(ENGINE, "s1")
    beat = engine("a", 2)
    assert not router.can_take([beat], "m")
    assert router.credit(beat) == 1
    send(router, beat, "s2")
    assert router.credit(beat) == router.credit(engine("a", 3)) == 0
    answer(router, "s2")
    assert router.can_take([beat], "m")
    assert router.credit(engine("a", 4)) == 16


def test_where_a_placement_failed_is_only_tried_again_if_there_is_nothing_else():
    router, first, second = Router(), engine("a"), engine("b", num_running=8)
    assert router.choose_engine([first, second], "m", 10, [], {ENGINE}) is second
    assert router.choose_engine([first], "m", 10, [], {ENGINE}) is first


def test_the_choices_of_a_prompt_go_where_it_is_computed_while_there_is_a_row():
    router, busy, idle = Router(), engine("a", num_running=7), engine("b")
    assert router.choose_engine([busy, idle], "m", 10, [], affinity={ENGINE}) is busy
    send(router, busy, "s0")
    assert router.choose_engine([busy, idle], "m", 10, [], affinity={ENGINE}) is idle


def test_a_sequence_that_joins_a_search_goes_to_its_siblings_even_without_credit():
    full, idle = engine("a", credits=-3, num_running=8), engine("b")
    router = Router()
    router.record_dispatch(full, "s0", 10, [])
    assert router.choose_engine([full, idle], "m", 10, [], affinity={ENGINE}) is idle
    assert router.choose_engine([full, idle], "m", 10, [], affinity={ENGINE}, joins=True) is full
    assert router.choose_engine([full, idle], "m", 10, [], avoid={ENGINE}, affinity={ENGINE}, joins=True) is idle
    assert router.choose_engine([full, idle], "m", 10, [], joins=True) is idle


def test_a_detokenizer_that_is_full_gets_no_more_streams():
    full = detokenizer("a", limits.STREAMS_MAX)
    assert Router().choose_detokenizer([full], "m") is None


def test_served_models_lists_ready_engines_only():
    assert set(served_models([engine("a"), engine("b", model="x", state="starting")])) == {"m"}


def test_a_client_without_a_sequence_at_an_engine_may_have_one_beyond_its_credit():
    router, full = Router(), engine("a", credits=0)
    for number in range(2):
        router.record_dispatch(full, f"old{number}", 10, [], "old")
    beat = engine("a", 2, credits=0)
    for name in ("old0", "old1"):
        router.record_answer(("a", "instance_id"), name, accepted=True)
    beat = engine("a", 3, credits=0)
    assert router.credit(beat, "old") == 0
    assert router.choose_engine([beat], "m", 10, [], client="old") is None
    assert router.choose_engine([beat], "m", 10, [], client="") is None
    assert router.choose_engine([beat], "m", 10, [], client="new") is beat
    router.record_dispatch(beat, "n0", 10, [], "new")
    assert router.credit(beat, "new") <= 0
    assert router.newcomers([beat]) is None, "the first newcomer has used what goes beyond the credit"
    router.record_end(("a", "instance_id"), "n0")
    newcomers = router.newcomers([beat])
    assert newcomers is not None
    assert [newcomers(name) for name in ("third", "old", "")] == [True, False, False]
    router.record_dispatch(beat, "t0", 10, [], "third")
    assert not newcomers("fourth"), "it follows what is sent"


def test_idle_sequences_take_no_credit_from_others_and_do_not_repel_them():
    router = Router()
    beat = engine(
        "a", credits=2, idle_credits=2, num_running=8, num_waiting=4, num_idle_running=7, num_idle_waiting=4,
        num_idle_waiting_tokens=500, num_waiting_tokens=500,
    )  # fmt: skip
    other = engine("b", num_running=2)
    for number in range(2):
        router.record_dispatch(beat, f"i{number}", 10, [], idle=True)
        router.record_answer(("a", "instance_id"), f"i{number}", accepted=True)
    assert (router.credit(beat), router.credit(beat, idle=True)) == (2, 0)
    assert router.choose_engine([beat, other], "m", 10, []) is beat, "only one of its sequences counts"
    assert router.choose_engine([beat], "m", 10, [], idle=True) is None
    router.record_dispatch(beat, "s0", 10, [])
    assert (router.credit(beat), router.credit(beat, idle=True)) == (1, -1)
    router.record_end(("a", "instance_id"), "i0")
    router.record_end(("a", "instance_id"), "i0")
    router.record_end(("a", "instance_id"), "s0")
    assert (router.credit(beat), router.credit(beat, idle=True)) == (2, 1)
    fresh = engine("a", 2, credits=1, idle_credits=-5)
    assert (router.credit(fresh), router.credit(fresh, idle=True)) == (1, 0)
    router.record_end(("a", "instance_id"), "i1")
    assert router.credit(engine("a", 3, credits=1, idle_credits=-5), idle=True) == 1, "one at each engine, always"


def test_sequences_that_recover_fill_a_step_of_an_engine_and_the_others_wait():
    router, only = Router(), engine("a", step_tokens=50)
    for name in ("s0", "s1"):
        assert router.choose_engine([only], "m", 10, [], recovers=True) is only
        router.record_dispatch(only, name, 60, [], recovers=True)
    assert router.choose_engine([only], "m", 10, [], recovers=True) is None
    assert router.choose_engine([only], "m", 10, []) is only  # new sequences do not wait for them
    router.record_output(("a", "instance_id"), "s0")
    assert router.choose_engine([only], "m", 10, [], recovers=True) is only


def test_blocks_of_the_prompt_that_the_engine_has_do_not_fill_its_steps():
    router, only = Router(), engine("a", step_tokens=50)
    num_tokens = 60 + 16 * len(BLOCKS)
    router.record_dispatch(only, "s0", num_tokens, BLOCKS)
    router.record_dispatch(only, "s1", num_tokens, BLOCKS, recovers=True)
    assert router.choose_engine([only], "m", 10, [], recovers=True) is only
    router.record_dispatch(only, "s2", num_tokens, BLOCKS, recovers=True)
    assert router.choose_engine([only], "m", 10, [], recovers=True) is None


def test_sequences_that_recover_go_to_an_engine_that_becomes_ready_before_their_turn():
    router, first, second = Router(), engine("a", step_tokens=50), engine("b", step_tokens=100)
    router.record_dispatch(first, "s0", 100, [], recovers=True)
    assert router.choose_engine([first], "m", 10, [], recovers=True) is None
    assert router.choose_engine([first, second], "m", 10, [], recovers=True) is second


def test_a_sequence_that_recovers_no_longer_counts_when_it_has_left_the_engine():
    router, only, address = Router(), engine("a", step_tokens=50), ("a", "instance_id")
    for leave in (router.record_end, router.record_silence):
        router.record_dispatch(only, "s0", 100, [], recovers=True)
        leave(address, "s0")
        assert router._may_recover(only)
    router.record_dispatch(only, "s1", 100, [], recovers=True)
    router.record_answer(address, "s1", accepted=False)
    assert router._may_recover(only)


def test_an_engine_of_an_earlier_version_that_tells_no_step_size_gets_all_at_once():
    router, only = Router(), engine("a")
    router.record_dispatch(only, "s0", 10_000, [], recovers=True)
    assert router.choose_engine([only], "m", 10, [], recovers=True) is only
