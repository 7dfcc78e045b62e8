"""Work that clients wait for: properties over random sequences of arrivals, ends and departures."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared.actors.fair_work import FairPlaces, FairRoom
from antiphon.shared.errors import ServiceError

CAPACITY, MOST, LONG_S = 3, 100, 600.0
CLIENTS = ("", "alice", "bob")


class Rig:
    """Tasks that hold places until they are told to end. `running`: their numbers, in the order of their turns."""

    def __init__(self) -> None:
        self.places = FairPlaces(CAPACITY)
        self.running: list[int] = []
        self.begun: list[str] = []
        """The clients whose tasks got a turn, in order."""
        self.tasks: list[asyncio.Task[None]] = []
        self._ends: list[asyncio.Event] = []

    def start(self, client: str, places: int = 1, cost: float = 1.0) -> int:
        self._ends.append(asyncio.Event())
        self.tasks.append(asyncio.create_task(self._hold(len(self.tasks), client, places, cost)))
        return len(self.tasks) - 1

    async def _hold(self, number: int, client: str, places: int, cost: float) -> None:
        async with self.places.take(client, places=places, cost=cost, wait_s=LONG_S):
            self.running.append(number)
            self.begun.append(client)
            try:
                await self._ends[number].wait()
            finally:
                self.running.remove(number)

    def end(self, number: int) -> None:
        self._ends[number].set()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


_calls = st.tuples(
    st.sampled_from(["start", "end", "leave", "both"]),
    st.sampled_from(CLIENTS),
    st.integers(1, CAPACITY + 2),
    st.integers(0, 50),
)


@given(st.lists(_calls, max_size=40))
def test_places_are_never_exceeded_and_never_lost(calls: list[tuple[str, str, int, int]]) -> None:
    async def main() -> None:
        rig, needs = Rig(), list[int]()
        for kind, client, places, which in calls:
            if kind == "start" or not rig.tasks:
                rig.start(client, places)
                needs.append(min(places, CAPACITY))
            if kind in ("end", "both"):
                rig.end(which % len(rig.tasks))
            if kind in ("leave", "both"):  # both: one leaves at the moment at which another one's end gives it its turn
                rig.tasks[(which + 1) % len(rig.tasks)].cancel()
            await settle()
            held = sum(needs[number] for number in rig.running)
            waiting = [number for number, task in enumerate(rig.tasks) if not task.done() and number not in rig.running]
            assert held <= CAPACITY
            assert not waiting or held + max(needs[number] for number in waiting) > CAPACITY
        for number in range(len(rig.tasks)):
            rig.end(number)
        await asyncio.gather(*rig.tasks, return_exceptions=True)
        last = rig.start("last", CAPACITY)
        await settle()
        assert rig.running == [last]
        rig.end(last)
        await rig.tasks[last]

    asyncio.run(main())


async def test_a_client_with_one_task_waits_for_one_turn_of_a_client_with_many() -> None:
    rig = Rig()
    for _ in range(10):
        rig.start("bob", CAPACITY)
    await settle()
    rig.start("alice", CAPACITY)
    for number in (0, 1):
        rig.end(number)
        await settle()
    assert rig.begun[:3].count("alice") == 1
    for task in rig.tasks:
        task.cancel()


async def test_turns_are_shared_by_cost() -> None:
    rig = Rig()
    numbers = [rig.start(client, CAPACITY, cost) for client, cost in (("large", 4.0), ("small", 1.0)) for _ in range(8)]
    for _ in numbers:
        await settle()
        rig.end(rig.running[0])
    await settle()
    assert rig.begun[:10].count("large") == 2
    assert sorted(rig.begun) == ["large"] * 8 + ["small"] * 8


async def test_a_task_does_not_wait_without_end() -> None:
    rig = Rig()
    first = rig.start("alice", CAPACITY)
    await settle()
    with pytest.raises(ServiceError) as refused:
        async with rig.places.take("bob", wait_s=0.001):
            raise AssertionError("there is no place")
    assert (refused.value.code, refused.value.retryable) == ("server_is_overloaded", True)
    rig.end(first)
    await rig.tasks[first]
    async with rig.places.take("bob", places=CAPACITY, wait_s=LONG_S):
        pass


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(1, 2 * MOST), st.booleans())))
def test_a_client_that_comes_later_finds_room(calls: list[tuple[str, int, bool]]) -> None:
    room, taken = FairRoom(MOST), list[tuple[str, int]]()
    for client, amount, gives_back in calls:
        if gives_back and taken:
            room.give_back(*taken.pop())
        elif room.take(client, amount):
            taken.append((client, amount))
        assert room.total == sum(amount for _, amount in taken)
        assert room.total <= MOST or len(taken) == 1
        free = (MOST - room.total) // 2
        if free > 0:
            assert room.take("newcomer", free)
            assert not room.take("newcomer", 1)
            room.give_back("newcomer", free)
    for one in taken:
        room.give_back(*one)
    assert room.total == 0


async def test_a_free_place_is_taken_at_once_unless_somebody_waits() -> None:
    places = FairPlaces(1)
    assert places.take_free()
    assert not places.take_free()
    waiting = asyncio.create_task(places.turn("alice"))
    await settle()
    places.give_back(1)
    assert not places.take_free(), "it belongs to the one who has waited"
    await waiting
    places.give_back(1)
    assert places.take_free()
