"""New requests while a real NATS server is restarted under their gateway."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.subjects import Subjects
from tests.conftest import Connect, NatsServer
from tests.integration.test_stalled_engine import Rig, expected
from tests.service_processes import START_S, Processes
from tests.sim.society import make_tokenizer

pytestmark = pytest.mark.nats


@pytest.fixture
async def rig(
    private_nats_server: NatsServer, nats_connect: Connect, subjects: Subjects, namespace: str, tmp_path: Path
) -> AsyncIterator[Rig]:
    async def connect(name: str) -> Any:
        return await nats_connect(private_nats_server, name)

    rig = Rig(connect, subjects, Processes(private_nats_server, namespace), make_tokenizer(tmp_path))
    await rig.start()
    yield rig
    await rig.close()


async def is_connected(rig: Rig, wanted: bool) -> None:
    async with asyncio.timeout(START_S):
        while rig.gateway.actor.transport.connected is not wanted:
            await asyncio.sleep(0.01)


@pytest.mark.matrix("B-10")
async def test_a_request_that_arrives_while_the_bus_is_away_waits_and_is_answered(
    rig: Rig, private_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUS_WAIT_S", 2 * START_S)
    await rig.engine("e1")
    private_nats_server.kill()
    await is_connected(rig, False)
    asked = [rig.ask(number) for number in range(3)]
    await asyncio.sleep(0.3)
    assert not any(sequence.engine for actor, _ in asked for sequence in actor.sequences), "nothing was sent"
    private_nats_server.start()
    assert await asyncio.gather(*(answer for _, answer in asked)) == [expected(number) for number in range(3)]

    private_nats_server.kill()
    await is_connected(rig, False)
    monkeypatch.setattr(limits, "BUS_WAIT_S", 0.1)
    _, answer = rig.ask(3)
    with pytest.raises(ServiceError) as refused:
        await answer
    assert (refused.value.code, refused.value.retry_after_s) == ("bus_unavailable", 1.0)
    private_nats_server.start()
    await is_connected(rig, True)
    monkeypatch.setattr(limits, "BUS_WAIT_S", START_S)
    _, answer = rig.ask(4)
    assert await answer == expected(4)
