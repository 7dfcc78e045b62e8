"""Which sequences a gateway asks its engines about."""

from antiphon.services.gateway.path.liveness.progress_watch import ProgressWatch
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared import limits

A, B = Address("a", "instance_id"), Address("b", "instance_id")
LATER = limits.STALL_S + 0.01


def test_a_sequence_is_overdue_without_text_for_a_while_and_asked_about_as_often():
    watch = ProgressWatch()
    watch.touch(A, "s0", 0.0)
    watch.touch(A, "s1", 0.2)
    watch.touch(B, "s2", 0.0)
    assert watch.overdue(A, limits.STALL_S) == []
    assert watch.overdue(A, LATER) == ["s0"]
    assert watch.overdue(A, LATER + 0.2) == ["s1"]
    assert watch.overdue(A, 2 * LATER) == ["s0"]
    assert watch.overdue(B, 1.0) == ["s2"]


def test_text_puts_a_sequence_back():
    watch = ProgressWatch()
    for name in ("s0", "s1"):
        watch.touch(A, name, 0.0)
    watch.touch(A, "s0", 1.0)
    assert watch.overdue(A, 1.1) == ["s1"]


def test_a_query_is_bounded_and_the_longest_silent_come_first():
    watch, count = ProgressWatch(), limits.LIVENESS_BATCH_MAX + 5
    for number in range(count):
        watch.touch(A, f"s{number}", 0.0)
    assert watch.overdue(A, 1.0) == [f"s{number}" for number in range(limits.LIVENESS_BATCH_MAX)]
    assert watch.overdue(A, 1.1) == [f"s{number}" for number in range(limits.LIVENESS_BATCH_MAX, count)]
    assert watch.overdue(A, 1.2) == []


def test_an_engine_without_sequences_is_not_known():
    watch = ProgressWatch()
    watch.touch(A, "s0", 0.0)
    watch.drop(A, "s0")
    watch.drop(A, "s0")
    assert watch.engines() == []
    assert watch.overdue(A, 10.0) == []


def test_time_without_a_link_does_not_count():
    watch = ProgressWatch()
    watch.touch(A, "s0", 0.0)
    watch.touch_all(100.0)
    assert watch.overdue(A, 100.0 + limits.STALL_S) == []
    assert watch.overdue(A, 100.0 + LATER) == ["s0"]
