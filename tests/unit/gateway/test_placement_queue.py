"""The queue in a gateway: order, withdrawal, and what is left of tickets that were withdrawn."""

import random

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.requests.placement_queue import STALE_ITEMS_MAX, PlacementQueue, Ticket


def ticket(number: int, priority: int = 0, model: str = "m", index: int = 0) -> Ticket[int]:
    return Ticket(number, model, priority, (number, index))


def drain(queue: PlacementQueue[int], model: str = "m") -> list[int]:
    order: list[int] = []
    while (first := queue.first(model)) is not None:
        queue.withdraw(first)
        order.append(first.claimant)
    return order


def test_sequences_leave_by_priority_and_then_as_their_requests_arrived():
    queue = PlacementQueue[int]()
    for number, priority in [(3, 0), (1, 0), (4, -1), (2, 5)]:
        queue.push(ticket(number, priority), 0.0)
    assert drain(queue) == [4, 1, 3, 2]
    assert len(queue) == 0


def test_a_sequence_that_comes_back_goes_before_those_who_came_later():
    queue, first = PlacementQueue[int](), ticket(1)
    queue.push(first, 0.0)
    for number in (2, 3):
        queue.push(ticket(number), 0.0)
    queue.withdraw(first)
    queue.push(first, 1.0)
    assert drain(queue) == [1, 2, 3]


def test_models_have_lines_of_their_own():
    queue = PlacementQueue[int]()
    queue.push(ticket(1, model="a"), 0.0)
    queue.push(ticket(2, model="b"), 0.0)
    assert queue.models() == ["a", "b"]
    assert drain(queue, "b") == [2]
    assert queue.models() == ["a"]
    assert queue.first("b") is None


def test_the_time_of_waiting_begins_with_the_first_push():
    queue, first = PlacementQueue[int](), ticket(1)
    queue.push(first, 1.0)
    queue.withdraw(first)
    queue.push(first, 2.0)
    assert [each.waits_since for each in queue.tickets("m")] == [1.0]
    assert queue.tickets("other") == []


def test_withdrawn_tickets_do_not_pile_up():
    queue, tickets = PlacementQueue[int](), [ticket(number) for number in range(5000)]
    for each in tickets:
        queue.push(each, 0.0)
    for each in tickets[1:]:
        assert queue.withdraw(each)
        assert not queue.withdraw(each)
    (line,) = queue._lines.values()
    assert len(line.heap) <= STALE_ITEMS_MAX + 2
    assert drain(queue) == [0]


@given(st.integers(0, 2**32))
def test_any_mix_of_pushes_and_withdrawals_keeps_the_order(seed: int):
    draw, queue = random.Random(seed), PlacementQueue[int]()
    tickets = [ticket(number, draw.randrange(3)) for number in range(30)]
    queued: set[int] = set()
    for _ in range(200):
        each = draw.choice(tickets)
        if each.claimant in queued:
            assert queue.withdraw(each)
            queued.discard(each.claimant)
        else:
            queue.push(each, 0.0)
            queued.add(each.claimant)
        assert len(queue) == len(queued)
    expected = sorted(queued, key=lambda number: (tickets[number].priority, number))
    assert drain(queue) == expected
