"""Which connections make room for new ones: against a list of all connections in the order of what they do."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.edge.http.server.places import Place, Places

KINDS = ("idle", "reading", "busy")
steps = st.lists(st.tuples(st.sampled_from(("take", "leave", *KINDS)), st.integers(0, 7)), max_size=60)


@given(st.integers(1, 5), steps)
def test_the_connection_that_has_waited_longest_makes_room_and_one_with_an_answer_never(
    size: int, steps: list[tuple[str, int]]
) -> None:
    places, open_, kinds, closed = Places(size), list[Place](), dict[Place, str](), list[Place]()

    def leave(place: Place) -> None:
        open_.remove(place)
        kinds.pop(place)

    for what, number in steps:
        if what == "take":
            candidates = [one for kind in KINDS[:2] for one in open_ if kinds[one] == kind]
            expected = candidates[: max(0, len(open_) - size + 1)]
            place = places.take()
            assert closed == expected
            for one in expected:
                leave(one)
            closed.clear()
            assert place.is_extra == (len(open_) == size)
            place.close = lambda place=place: closed.append(place)
            open_.append(place)
            kinds[place] = "idle"
        elif open_ and what == "leave":
            chosen = open_[number % len(open_)]
            chosen.leave()
            leave(chosen)
            chosen.leave()
            chosen.busy()
        elif open_ and not (chosen := open_[number % len(open_)]).is_extra:  # an extra one is refused
            getattr(chosen, what)()
            open_.remove(chosen)
            open_.append(chosen)
            kinds[chosen] = what
        assert len(places) == len(open_) <= size + 1
        assert len(places.busy) == sum(kind == "busy" for kind in kinds.values()) <= size


def test_one_connection_more_than_there_is_room_for_is_refused_and_makes_room_for_the_next() -> None:
    places, closed = Places(1), list[str]()
    places.take().busy()
    extra = places.take()
    extra.close = lambda: closed.append("extra")
    assert extra.is_extra
    assert places.take().is_extra
    assert closed == ["extra"]
    assert len(places) == 2
