"""Turns among requests that begin at the same time: API keys alternate, and a turn is never lost."""

import asyncio

import pytest

from antiphon.services.gateway.edge.access.turns import Turn, Turns
from antiphon.shared import limits


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def long_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURN_S", 3600.0)


class Requests:
    """Requests that begin and note the order in which they get their turns."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.order, self.held = turns, list[str](), dict[str, Turn]()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, key: str, count: int = 1) -> None:
        for _ in range(count):
            name = f"{key}{len([one for one in self.tasks if one.startswith(key)])}"
            self.tasks[name] = asyncio.create_task(self._begin(key, name))

    async def _begin(self, key: str, name: str) -> None:
        self.held[name] = await self.turns.begin(key)
        self.order.append(name)

    async def end(self, count: int) -> None:
        for name in list(self.held)[:count]:
            self.held.pop(name).end()
        await settled()


async def test_a_key_with_one_request_does_not_wait_for_all_of_another_key() -> None:
    requests = Requests(Turns())
    requests.begin("a", 200)
    await settled()
    assert len(requests.order) == limits.TURNS_AT_ONCE
    requests.begin("b")
    await settled()
    await requests.end(2)
    assert sorted(requests.order[-2:]) == ["a8", "b0"]
    requests.begin("c", 2)
    requests.begin("b")
    await settled()
    await requests.end(4)
    assert sorted(requests.order[-4:]) == ["a9", "b1", "c0", "c1"]


async def test_all_get_a_turn_and_room_is_left_at_the_end() -> None:
    requests = Requests(Turns())
    for key in "abc":
        requests.begin(key, 20)
    while len(requests.order) < 60:
        await settled()
        await requests.end(3)
    await requests.end(60)
    requests.begin("d", limits.TURNS_AT_ONCE)
    await settled()
    assert len(requests.held) == limits.TURNS_AT_ONCE


async def test_a_request_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    requests = Requests(Turns())
    requests.begin("a", limits.TURNS_AT_ONCE + 2)
    requests.begin("b")
    await settled()
    first, second = (requests.tasks[f"a{limits.TURNS_AT_ONCE + number}"] for number in (0, 1))
    first.cancel()
    await settled()
    # Cancelled at the moment at which it has got its turn.
    requests.held.pop("a0").end()
    second.cancel()
    await settled()
    assert requests.order[-1] == "b0"
    await requests.end(limits.TURNS_AT_ONCE)
    requests.begin("c", limits.TURNS_AT_ONCE)
    await settled()
    assert len([name for name in requests.held if name[0] == "c"]) == limits.TURNS_AT_ONCE


async def test_a_turn_ends_by_itself_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURN_S", 0.01)
    turns = Turns()
    held = [await turns.begin("a") for _ in range(limits.TURNS_AT_ONCE)]
    again = [await turns.begin("a") for _ in range(limits.TURNS_AT_ONCE)]
    for turn in held:
        turn.end()
    monkeypatch.setattr(limits, "TURN_S", 3600.0)
    waiting = asyncio.create_task(turns.begin("a"))
    await waiting
    for turn in again:
        turn.end()
        turn.end()
    assert await turns.begin("a")
