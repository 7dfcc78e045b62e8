"""The order of the queue, and that it stays small."""

import dataclasses

import pytest

from antiphon.services.engine.core.policy.waiting import WaitingQueue
from antiphon.services.engine.core.sequence import Sequence, Status, from_spec
from antiphon.services.engine.core.stopping import rules_for
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
    names: list[str] = []
    while (head := queue.head()) is not None:
        queue.pop(head, head.num_tokens)
        names.append(head.sequence_id)
    return names


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
    assert len(queue._lines[""].heap) < 100


def of_client(number: int, client: str, *, weight: float = 1.0, rank: int = 0, priority: int = 0) -> Sequence:
    given = spec(f"{client}{number}", prompt_of(10), max_tokens=10, priority=priority, arrival=number)
    given = dataclasses.replace(given, client=client, client_weight=weight, client_priority=rank)
    return from_spec(given, rules_for(given.params, 10, 100, frozenset()), number, 4)


@pytest.mark.matrix("P-08")
def test_clients_take_turns_however_many_sequences_one_of_them_has() -> None:
    queue = WaitingQueue()
    for number in range(6):
        queue.push(of_client(number, "a"))
    for number in range(6, 8):
        queue.push(of_client(number, "b"))
    queue.push(of_client(8, "b", priority=-1))
    assert drained(queue) == ["a0", "b8", "a1", "b6", "a2", "b7", "a3", "a4", "a5"]


def test_a_client_with_twice_the_weight_gets_twice_as_much() -> None:
    queue = WaitingQueue()
    for number in range(0, 12, 2):
        queue.push(of_client(number, "a", weight=2))
        queue.push(of_client(number + 1, "b"))
    assert "".join(name[0] for name in drained(queue)[:9]) == "abaabaaba"


def test_a_client_with_a_lower_number_goes_before_all_others_whatever_their_requests_say() -> None:
    queue = WaitingQueue()
    queue.push(of_client(0, "b", priority=-100))
    queue.push(of_client(1, "a", rank=-1, priority=100))
    queue.push(of_client(2, "a", rank=-1))
    assert drained(queue) == ["a2", "a1", "b0"]


def test_short_answers_are_charged_as_short_ones() -> None:
    queue = WaitingQueue()
    first = of_client(0, "a")
    for each in (first, of_client(1, "a"), of_client(2, "b"), of_client(3, "b")):
        queue.push(each)
    queue.pop(first, 10)
    first.move_to(Status.RUNNING)
    first.move_to(Status.FINISHED)
    queue.stopped(first)  # no output at all
    names: list[str] = []
    for _ in range(3):
        head = queue.head()
        assert head is not None
        queue.pop(head, 10)
        names.append(head.sequence_id)
    assert names == ["b2", "a1", "b3"]


def test_newcomers_are_clients_without_a_running_sequence_and_sequences_without_a_client() -> None:
    queue = WaitingQueue()
    running, waiting, other = of_client(0, "a"), of_client(1, "a"), of_client(2, "b")
    for each in (running, waiting):
        queue.push(each)
    queue.pop(running, 10)
    assert queue.head() is waiting
    assert queue.head(newcomers_only=True) is None
    queue.push(other)
    assert queue.head(newcomers_only=True) is other
    running.move_to(Status.RUNNING)
    running.move_to(Status.FINISHED)
    queue.stopped(running)
    queue.pop(other, 10)
    assert queue.head(newcomers_only=True) is waiting
    queue = WaitingQueue()
    for each in (sequence(0), sequence(1)):
        queue.push(each)
    first = queue.head()
    assert first is not None
    queue.pop(first, 5)
    assert queue.head(newcomers_only=True) is not None
