"""The order of the queue, and that it stays small."""

from services.engine.core.sequence import Sequence, Status, from_spec
from services.engine.core.stopping import rules_for
from services.engine.core.waiting import WaitingQueue
from tests.unit.engine.core.factories import prompt_of, spec


def sequence(number: int, *, priority: int = 0, arrival: int = 0, length: int = 5) -> Sequence:
    given = spec(f"s{number}", prompt_of(length), priority=priority, arrival=arrival)
    return from_spec(given, rules_for(given.params, length, 100, frozenset()), number, 4)


def preempted(number: int, *, priority: int = 0, arrival: int = 0) -> Sequence:
    made = sequence(number, priority=priority, arrival=arrival)
    made.move_to(Status.RUNNING)
    made.move_to(Status.PREEMPTED)
    return made


def drained(queue: WaitingQueue) -> list[str]:
    return [queue.pop().sequence_id for _ in range(queue.num_waiting)]


def test_lower_priority_value_first_then_arrival_then_order_of_adding() -> None:
    queue = WaitingQueue()
    queue.push(sequence(0, priority=1, arrival=0))
    queue.push(sequence(1, arrival=5))
    queue.push(sequence(2, arrival=4))
    queue.push(sequence(3, arrival=4))
    queue.push(sequence(4, priority=-1, arrival=9))
    assert drained(queue) == ["s4", "s2", "s3", "s1", "s0"]


def test_preempted_sequences_go_to_the_front_of_their_priority_oldest_first() -> None:
    queue = WaitingQueue()
    queue.push(sequence(0, arrival=0))
    queue.push(sequence(1, priority=-1, arrival=9))
    queue.push(preempted(2, arrival=8))
    queue.push(preempted(3, arrival=7))
    assert drained(queue) == ["s1", "s3", "s2", "s0"]


def test_aborted_sequences_are_neither_counted_nor_found() -> None:
    queue = WaitingQueue()
    waiting = [sequence(number, length=number + 1) for number in range(4)]
    for each in waiting:
        queue.push(each)
    for each in (waiting[0], waiting[2]):
        each.move_to(Status.FINISHED)
        queue.forget(each)
    assert (queue.num_waiting, queue.num_tokens) == (2, 2 + 4)
    assert {each.sequence_id for each in queue} == {"s1", "s3"}
    assert drained(queue) == ["s1", "s3"]
    assert queue.head() is None
    assert queue.num_tokens == 0


def test_aborted_sequences_behind_a_head_that_never_moves_do_not_pile_up() -> None:
    queue = WaitingQueue()
    queue.push(sequence(0, priority=-1))
    for number in range(1, 2000):
        each = sequence(number)
        queue.push(each)
        each.move_to(Status.FINISHED)
        queue.forget(each)
    assert queue.num_waiting == 1
    assert len(queue._heap) < 100
