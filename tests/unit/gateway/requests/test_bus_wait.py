"""Requests that arrive while their gateway is disconnected: how many wait, and how long."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from antiphon.services.gateway.path.liveness.bus_wait import BusWait
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.errors import ServiceError
from antiphon.shared.subjects import Subjects
from tests.support.memory import MemoryBus


class Rig:
    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.transport = self.bus.connect("gateway")
        self.wait = BusWait(
            Host(transport=self.transport, subjects=Subjects(), clock=SystemClock(), id="g1", instance_id="i1")
        )


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.transport.close()


async def test_a_connected_gateway_makes_nobody_wait(rig: Rig) -> None:
    rig.wait.check()
    await rig.wait.connected()


async def test_those_who_wait_go_on_when_the_bus_is_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUS_WAIT_S", 600.0)
    rig.bus.partition("gateway")
    waiting = [asyncio.create_task(rig.wait.connected()) for _ in range(3)]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert not done
    rig.bus.heal("gateway")
    await asyncio.gather(*waiting)


async def test_after_a_while_they_are_refused_and_may_come_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUS_WAIT_S", 0.05)
    rig.bus.partition("gateway")
    with pytest.raises(ServiceError) as refused:
        await rig.wait.connected()
    assert (refused.value.code, refused.value.retry_after_s) == ("bus_unavailable", 1.0)


async def test_only_so_many_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUS_WAIT_S", 600.0)
    monkeypatch.setattr(limits, "BUS_WAITERS_MAX", 2)
    rig.bus.partition("gateway")
    waiting = [asyncio.create_task(rig.wait.connected()) for _ in range(2)]
    rig.wait.check()
    await asyncio.sleep(0)
    with pytest.raises(ServiceError, match="The bus cannot be reached"):
        rig.wait.check()
    with pytest.raises(ServiceError, match="The bus cannot be reached"):
        await rig.wait.connected()
    # One that is cancelled makes room.
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    rig.wait.check()
    rig.bus.heal("gateway")
    await waiting[1]
