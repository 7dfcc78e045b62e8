"""Tokens that come before their stream: held, bounded in number and time."""

from antiphon.services.detokenizer.early_events import EarlyEvent, EarlyEvents
from antiphon.shared import limits
from antiphon.shared.messages import TokenEvent


def early(name: str, position: int = 0, attempt: int = 1, at: float = 0.0) -> EarlyEvent:
    return EarlyEvent(
        event=TokenEvent(sequence_id=name, attempt=attempt, position=position, token_ids=(1,)),
        engine_id="e",
        engine_instance_id="b",
        step=1,
        held_at=at,
    )


def test_a_stream_gets_what_came_for_its_attempt_in_order():
    events = EarlyEvents()
    for event in (early("a"), early("b"), early("a", 1), early("a", 0, attempt=2)):
        assert events.hold(event)
    assert [each.event.position for each in events.take("a", 1)] == [0, 1]
    assert events.take("a", 1) == []
    assert len(events) == 1


def test_what_nobody_opens_is_dropped_after_a_while():
    events = EarlyEvents()
    events.hold(early("a"))
    events.hold(early("a", 1))
    events.hold(early("b", at=1.0))
    assert events.expire(limits.EARLY_EVENT_S) == 0
    assert events.expire(limits.EARLY_EVENT_S + 0.1) == 2
    assert len(events) == 1


def test_the_number_of_held_events_is_bounded():
    events = EarlyEvents()
    held = [events.hold(early(f"s{number}")) for number in range(limits.EARLY_EVENTS_MAX + 1)]
    assert (held.count(True), held[-1]) == (limits.EARLY_EVENTS_MAX, False)


def test_late_tokens_of_a_closed_stream_are_not_held_but_those_of_its_next_placement_are():
    events = EarlyEvents()
    events.close("a", 1)
    assert not events.hold(early("a"))
    assert events.hold(early("a", attempt=2))


def test_the_memory_of_closed_streams_is_bounded():
    events = EarlyEvents()
    for number in range(limits.CLOSED_STREAMS_MAX + 1):
        events.close(f"s{number}", 1)
    assert events.hold(early("s0"))
    assert not events.hold(early("s1"))
