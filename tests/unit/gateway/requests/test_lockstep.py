"""Lockstep: what is shown when, who is wrong, and which engines get no work."""

import itertools

import pytest

from antiphon.services.gateway.guests.lockstep.pair import Difference, Pair
from antiphon.services.gateway.guests.lockstep.trust import Trust, opinions, twins, with_twins
from antiphon.services.gateway.guests.lockstep.verdict import by_repetition, by_self_test, by_third
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared.messages import Heartbeat, TextEvent
from tests.support.heartbeats import engine_status, heartbeat

ENGINE = Address("e1", "i1")


def event(position: int, *token_ids: int, attempt: int = 1) -> TextEvent:
    return TextEvent(
        sequence_id="r-0",
        attempt=attempt,
        position=position,
        token_ids=token_ids,
        text_offset=position,
        text="x" * len(token_ids),
    )


def held(*events: TextEvent) -> Pair:
    pair = Pair()
    pair.held.extend((each, ENGINE) for each in events)
    return pair


def shown(pair: Pair, attempt: int = 1) -> list[int]:
    released, difference = pair.release(attempt)
    assert difference is None
    return [token for each, _ in released for token in each.token_ids]


def test_text_waits_for_the_slower_engine() -> None:
    pair = held(event(0, 1), event(1, 2, 3), event(3, 4))
    assert shown(pair) == []
    pair.add(0, (1,), ended=False)
    assert shown(pair) == [1]
    pair.add(1, (2,), ended=False)
    assert shown(pair) == [], "an event is shown whole"
    pair.add(2, (3, 4), ended=False)
    assert shown(pair) == [2, 3, 4]
    assert pair.num_compared == 4


def test_tokens_of_the_copy_that_are_missing_are_asked_for_and_repeated_ones_do_no_harm() -> None:
    pair = held(event(0, 1, 2, 3))
    assert not pair.add(1, (2,), ended=False)
    assert pair.add(0, (1, 2), ended=False)
    assert pair.add(1, (2, 3), ended=False)
    assert pair.copied == [1, 2, 3]


def test_nothing_from_the_first_difference_on_is_shown() -> None:
    pair = held(event(0, 1, 2), event(2, 3, 9), event(4, 5))
    pair.add(0, (1, 2, 3, 4, 5), ended=False)
    released, difference = pair.release(1)
    assert [each.position for each, _ in released] == [0]
    assert difference == Difference(3, (9, 4))


def test_a_difference_is_found_before_the_copy_has_the_whole_event() -> None:
    pair = held(event(0, 1, 2, 3))
    pair.add(0, (1, 7), ended=False)
    assert pair.release(1)[1] == Difference(1, (2, 7))


def test_an_engine_that_ends_before_the_other_differs_from_it() -> None:
    pair = held(event(0, 1, 2))
    pair.add(0, (1,), ended=True)
    assert pair.release(1)[1] == Difference(1, (2, None))


def test_events_of_an_earlier_placement_are_dropped_and_a_new_copy_continues_what_was_agreed_on() -> None:
    pair = held(event(0, 1, 9), event(0, 1, 2, attempt=2))
    pair.restart([1])
    assert shown(pair, attempt=2) == []
    pair.add(1, (2,), ended=False)
    assert shown(pair, attempt=2) == [1, 2]


def test_an_event_without_tokens_is_shown_when_its_turn_comes() -> None:
    pair = held(event(0, 1), event(1))
    assert shown(pair) == []
    pair.add(0, (1,), ended=True)
    assert len(pair.release(1)[0]) == 2


def test_without_a_copy_everything_is_shown() -> None:
    pair = held(event(0, 1), event(1, 2))
    assert [each.position for each, _ in pair.release_all()] == [0, 1]
    assert not pair.held


@pytest.mark.parametrize(("third", "loser"), [(5, 1), (6, 0), (7, None), (None, None)])
def test_a_third_engine_decides_if_it_agrees_with_one(third: int | None, loser: int | None) -> None:
    assert by_third((5, 6), third) == loser


@pytest.mark.parametrize(
    ("again", "loser"),
    [((5, 6), None), ((5, 5), 1), ((6, 6), 0), ((6, 5), None), ((None, 6), None), ((5, None), None), ((5, 8), 1)],
)
def test_the_engine_that_alone_changes_its_mind_is_wrong(
    again: tuple[int | None, int | None], loser: int | None
) -> None:
    assert by_repetition((5, 6), again) == loser


def test_an_engine_that_had_ended_and_goes_on_has_changed_its_mind() -> None:
    assert by_repetition((5, None), (5, 5)) == 1


@pytest.mark.parametrize(
    ("faults", "loser"),
    [
        (("", ""), None),
        (("bad", ""), 0),
        (("", "bad"), 1),
        (("bad", "bad"), None),
        ((None, "bad"), 1),
        ((None, ""), None),
    ],
)
def test_the_engine_that_alone_finds_a_fault_is_wrong(faults: tuple[str | None, str | None], loser: int | None) -> None:
    assert by_self_test(faults) == loser


def test_whatever_two_sound_engines_and_a_wrong_one_say_a_sound_one_is_never_condemned() -> None:
    """All orders in which one wrong engine and two sound ones can be asked; sound engines give the right token 1."""
    for wrong, wrong_again in itertools.product((0, 2, 3), (1, 2, 3)):
        for side in (0, 1):
            tokens, again = ([1, 1], [1, 1])
            tokens[side], again[side] = wrong, wrong_again
            pair = tokens[0], tokens[1]
            assert by_third(pair, 1) == side
            assert by_repetition(pair, (again[0], again[1])) in (side, None)


# --- trust ------------------------------------------------------------------------------------------------------------


def engine(
    name: str, digest: str = "d", configuration: str = "c", *, invariant: bool = True, role: str = "both"
) -> Heartbeat:
    status = engine_status(
        "m", max_num_seqs=4, configuration=configuration, golden_digest=digest,
        batch_invariant=invariant, role=role,
    )  # fmt: skip
    return heartbeat("engine", name, f"i-{name}", status, interval_s=0.15)


def address(name: str) -> Address:
    return Address(name, f"i-{name}")


def test_a_minority_of_three_is_outvoted_and_gets_no_work() -> None:
    engines = [engine("e1"), engine("e2"), engine("e3", "other")]
    found = opinions(engines)
    assert found.outvoted == {address("e3")}
    assert not found.doubted
    assert [one.id for one in Trust().trusted(engines)] == ["e1", "e2"]


@pytest.mark.parametrize("digests", [("d", "x"), ("d", "d", "x", "x"), ("d", "x", "y")])
def test_without_a_majority_engines_that_differ_are_reported_only(digests: tuple[str, ...]) -> None:
    engines = [engine(f"e{index}", digest) for index, digest in enumerate(digests)]
    found = opinions(engines)
    assert not found.outvoted
    assert found.doubted == {address(one.id) for one in engines}
    assert len(Trust().trusted(engines)) == len(engines)


def test_only_engines_of_one_configuration_are_compared() -> None:
    engines = [engine("e1"), engine("e2"), engine("e3", "other", "c2"), engine("e4", "")]
    assert opinions(engines) == opinions([])


def test_a_quarantined_engine_gets_no_work_and_its_successor_does() -> None:
    trust, engines = Trust(), [engine("e1"), engine("e2")]
    assert trust.quarantine(address("e1"), "it was wrong")
    assert not trust.quarantine(address("e1"), "again")
    assert [one.id for one in trust.trusted(engines)] == ["e2"]
    successor = heartbeat("engine", "e1", "later", engines[0].status, interval_s=0.15)
    assert len(trust.trusted([successor])) == 1


def test_twins_compute_the_same_to_the_last_bit() -> None:
    first = engine("e1")
    others = [
        engine("e2"),
        engine("e3", configuration="c2"),
        engine("e4", invariant=False),
        engine("e5", role="prefill"),
    ]
    assert [one.id for one in twins(first, [first, *others])] == ["e2"]
    assert [one.id for one in with_twins([first, *others], "m")] == ["e1", "e2"]
    assert with_twins([first, *others[1:]], "m") == []
