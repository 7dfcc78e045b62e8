"""The queue in a gateway: order, withdrawal, and what is left of tickets that were withdrawn."""

import random

from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.path.generation import Client
from antiphon.services.gateway.path.placement.placement_queue import STALE_ITEMS_MAX, PlacementQueue, Ticket


def ticket(number: int, priority: int = 0, model: str = "m", index: int = 0) -> Ticket:
    return Ticket(model=model, priority=priority, arrival=(number, index))


def drain(queue: PlacementQueue[Ticket], model: str = "m") -> list[int]:
    order: list[int] = []
    while (first := queue.first(model)) is not None:
        queue.withdraw(first)
        order.append(first.arrival[0])
    return order


def test_sequences_leave_by_priority_and_then_as_their_requests_arrived():
    queue = PlacementQueue[Ticket]()
    for number, priority in [(3, 0), (1, 0), (4, -1), (2, 5)]:
        queue.push(ticket(number, priority), 0.0)
    assert drain(queue) == [4, 1, 3, 2]
    assert len(queue) == 0


def test_a_sequence_that_comes_back_goes_before_those_who_came_later():
    queue, first = PlacementQueue[Ticket](), ticket(1)
    queue.push(first, 0.0)
    for number in (2, 3):
        queue.push(ticket(number), 0.0)
    queue.withdraw(first)
    queue.push(first, 1.0)
    assert drain(queue) == [1, 2, 3]


def test_an_earlier_turn_goes_before_the_order_of_arrival():
    queue = PlacementQueue[Ticket]()
    for number, turn in [(1, None), (2, (0, 50)), (3, (0, 20)), (4, None)]:
        one = ticket(number)
        one.turn = turn
        queue.push(one, 0.0)
    assert drain(queue) == [3, 2, 1, 4]


def test_models_have_lines_of_their_own():
    queue = PlacementQueue[Ticket]()
    queue.push(ticket(1, model="a"), 0.0)
    queue.push(ticket(2, model="b"), 0.0)
    assert queue.models() == ["a", "b"]
    assert drain(queue, "b") == [2]
    assert queue.models() == ["a"]
    assert queue.first("b") is None


def test_the_time_of_waiting_begins_with_the_first_push():
    queue, first = PlacementQueue[Ticket](), ticket(1)
    queue.push(first, 1.0)
    queue.withdraw(first)
    queue.push(first, 2.0)
    assert [each.waits_since for each in queue.tickets("m")] == [1.0]
    assert queue.tickets("other") == []


def test_withdrawn_tickets_do_not_pile_up():
    queue, tickets = PlacementQueue[Ticket](), [ticket(number) for number in range(5000)]
    for each in tickets:
        queue.push(each, 0.0)
    for each in tickets[1:]:
        assert queue.withdraw(each)
        assert not queue.withdraw(each)
    (heap,) = queue._lines["m", False].heaps.values()
    assert len(heap.items) <= STALE_ITEMS_MAX + 2
    assert drain(queue) == [0]


@given(st.integers(0, 2**32))
def test_any_mix_of_pushes_and_withdrawals_keeps_the_order(seed: int):
    draw, queue = random.Random(seed), PlacementQueue[Ticket]()
    tickets = [ticket(number, draw.randrange(3)) for number in range(30)]
    queued: set[int] = set()
    for _ in range(200):
        each = draw.choice(tickets)
        if each.arrival[0] in queued:
            assert queue.withdraw(each)
            queued.discard(each.arrival[0])
        else:
            queue.push(each, 0.0)
            queued.add(each.arrival[0])
        assert len(queue) == len(queued)
    expected = sorted(queued, key=lambda number: (tickets[number].priority, number))
    assert drain(queue) == expected


def client_ticket(number: int, client: Client, cost: int = 10, priority: int = 0) -> Ticket:
    return Ticket(model="m", priority=priority, arrival=(number, 0), client=client, cost=cost)


def take_all(queue: PlacementQueue[Ticket]) -> list[int]:
    order: list[int] = []
    while (first := queue.first("m")) is not None:
        queue.take(first)
        order.append(first.arrival[0])
    return order


def test_clients_take_turns_and_each_keeps_its_own_order():
    queue, many, few = PlacementQueue[Ticket](), Client("many"), Client("few")
    for number in range(6):
        queue.push(client_ticket(number, many), 0.0)
    for number in (10, 11):
        queue.push(client_ticket(number, few), 0.0)
    queue.push(client_ticket(12, few, priority=-1), 0.0)
    assert take_all(queue) == [0, 12, 1, 10, 2, 11, 3, 4, 5]


def test_the_charge_is_corrected_when_the_length_is_known():
    queue, one, two = PlacementQueue[Ticket](), Client("one"), Client("two")
    for number in range(3):
        queue.push(client_ticket(number, one, cost=100), 0.0)
        queue.push(client_ticket(10 + number, two, cost=50), 0.0)
    first = queue.first("m")
    assert first is not None
    queue.take(first)
    queue.settle(first, 10)
    assert take_all(queue) == [10, 1, 11, 12, 2]
    queue.settle(Ticket(model="unknown", priority=0, arrival=(1, 0)), 5)


@given(st.integers(0, 2**32))
def test_any_mix_of_clients_pushes_and_withdrawals_loses_no_ticket(seed: int):
    draw, queue = random.Random(seed), PlacementQueue[Ticket]()
    clients = [Client(f"c{index}", 1.0 + index, index % 2) for index in range(4)]
    tickets = [client_ticket(number, draw.choice(clients), draw.randrange(1, 99)) for number in range(40)]
    queued: set[int] = set()
    for _ in range(200):
        each = draw.choice(tickets)
        if each.arrival[0] not in queued:
            queue.push(each, 0.0)
            queued.add(each.arrival[0])
        elif draw.random() < 0.5:
            assert queue.withdraw(each)
            queued.discard(each.arrival[0])
        else:
            first = queue.first("m")
            assert first is not None
            assert first.client.priority == min(tickets[number].client.priority for number in queued)
            same = [number for number in queued if tickets[number].client is first.client]
            assert first.arrival[0] == min(same)
            queue.take(first)
            queued.discard(first.arrival[0])
        assert len(queue) == len(queued)
        assert {ticket.arrival[0] for ticket in queue.tickets("m")} == queued
    assert set(take_all(queue)) == queued


def test_the_idle_lane_is_a_line_of_its_own_until_the_time_of_a_ticket_is_over():
    queue = PlacementQueue[Ticket]()
    soon, later, now = ticket(1), ticket(2), ticket(3)
    soon.idle_until, later.idle_until = 10.0, 20.0
    for each in (soon, later, now):
        queue.push(each, 5.0)
    assert (len(queue), queue.num_ordinary, queue.models()) == (3, 1, ["m"])
    assert (queue.first("m"), queue.first("m", idle=True)) == (now, soon)
    queue.promote(9.0)
    assert queue.num_ordinary == 1
    queue.promote(10.0)
    assert (queue.first("m"), queue.first("m", idle=True), queue.num_ordinary) == (soon, later, 2)
    assert soon.waits_since == 5.0
    assert {one.arrival[0] for one in queue.tickets("m")} == {1, 2, 3}
    queue.take(later)
    queue.settle(later, 7)
    queue.promote(30.0)
    assert drain(queue) == [1, 3]


def test_a_ticket_that_comes_back_after_its_time_is_not_idle():
    queue, one = PlacementQueue[Ticket](), ticket(1)
    one.idle_until = 10.0
    queue.push(one, 0.0)
    queue.take(one)
    queue.push(one, 11.0)
    assert (queue.first("m"), queue.first("m", idle=True)) == (one, None)
