"""When the launcher takes the processes of a version for ready, from their heartbeats."""

import asyncio

import pytest

from antiphon.versions.watch import MemberWatch
from shared.actors.host import Host
from shared.clock import SystemClock
from shared.codec import encode
from shared.messages import EngineStatus, Heartbeat, PoolStatus, ServiceName, StreamStatus, VisionStatus
from shared.subjects import Subjects
from tests.support.memory import MemoryBus, MemoryTransport

MODEL = "tiny@2"
STATUSES = {
    "tokenizer": PoolStatus(model=MODEL),
    "engine": EngineStatus(MODEL, "/models/tiny", 512, 300, 16, 100, 100, 8),
    "detokenizer": StreamStatus(model=MODEL),
    "vision": VisionStatus(model=MODEL),
}


async def beat(transport: MemoryTransport, subjects: Subjects, service: ServiceName) -> None:
    heartbeat = Heartbeat(service, f"{service}-1", "i", 2, "ready", 1, 0.2, STATUSES[service])
    await transport.publish(subjects.heartbeat(service, f"{service}-1"), encode(heartbeat))
    await transport.barrier()


@pytest.mark.parametrize("services", [("tokenizer", "engine", "detokenizer"), tuple(STATUSES)])
async def test_a_version_is_ready_when_each_of_its_services_is_also_that_of_pictures(
    services: tuple[ServiceName, ...],
) -> None:
    bus, subjects = MemoryBus(), Subjects("antiphon")
    launcher, others = bus.connect("launcher"), bus.connect("others")
    watch = MemberWatch(Host(launcher, subjects, SystemClock(), "launcher", "i"))
    async with watch.watching():
        for service in services:
            assert not watch.is_ready(MODEL, services), service
            await beat(others, subjects, service)
        async with asyncio.timeout(5):
            while not watch.is_ready(MODEL, services):
                await asyncio.sleep(0.01)
        assert not watch.is_ready("tiny", services)
