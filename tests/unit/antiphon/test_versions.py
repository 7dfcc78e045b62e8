"""What the launcher checks before it starts a version, when it takes its processes for ready, and what it tells."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.launch.launcher import Place, VersionPlan
from antiphon.services.gateway.path.models.versions import VersionDirectory
from antiphon.settings import ServeSettings
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.codec import Decoder, encode
from antiphon.shared.deployment.model_versions import ENCODER, ModelState, ModelStates, ModelVersion
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import (
    ChangeModel,
    MemberEnded,
    ModelsChanged,
    PoolStatus,
    ServiceName,
    StreamStatus,
    VisionStatus,
)
from antiphon.shared.models.image_models import check_image_files
from antiphon.shared.subjects import Subjects
from antiphon.supervision.death_notice import DeathNotices
from antiphon.supervision.processes import ChildSpec
from antiphon.versions.watch import MemberWatch
from tests.support.heartbeats import engine_status, heartbeat
from tests.support.memory import MemoryBus, MemoryTransport

MODEL = "tiny@2"
STATUSES = {
    "tokenizer": PoolStatus(model=MODEL),
    "engine": engine_status(MODEL),
    "detokenizer": StreamStatus(model=MODEL),
    "vision": VisionStatus(model=MODEL),
}

SERVICES: tuple[ServiceName, ...] = ("tokenizer", "engine", "detokenizer", "vision")


async def beat(transport: MemoryTransport, subjects: Subjects, service: ServiceName) -> None:
    message = heartbeat(service, f"{service}-1", "i", STATUSES[service], interval_s=0.2)
    await transport.publish(subjects.heartbeat(service, f"{service}-1"), encode(message))
    await transport.barrier()


@pytest.mark.parametrize("services", [("tokenizer", "engine", "detokenizer"), tuple(STATUSES)])
async def test_a_version_is_ready_when_each_of_its_services_is_also_that_of_images(
    services: tuple[ServiceName, ...],
) -> None:
    bus, subjects = MemoryBus(), Subjects("antiphon")
    launcher, others = bus.connect("launcher"), bus.connect("others")
    watch = MemberWatch(
        Host(transport=launcher, subjects=subjects, clock=SystemClock(), id="launcher", instance_id="i")
    )
    async with watch.watching():
        for service in services:
            assert not watch.is_ready(MODEL, services), service
            await beat(others, subjects, service)
        async with asyncio.timeout(60):
            while not watch.is_ready(MODEL, services):
                await asyncio.sleep(0.01)
        assert not watch.is_ready("tiny", services)


async def test_a_version_that_starts_while_another_watch_ends_gets_its_heartbeats() -> None:
    bus, subjects = MemoryBus(), Subjects("antiphon")
    launcher, others = bus.connect("launcher"), bus.connect("others")
    subscribe = launcher.subscribe
    ending, ended = asyncio.Event(), asyncio.Event()

    async def subscribed(*given: Any, **named: Any) -> Any:
        subscription = await subscribe(*given, **named)

        async def unsubscribe() -> None:
            ending.set()
            await ended.wait()
            await subscription.unsubscribe()

        return SimpleNamespace(unsubscribe=unsubscribe)

    host = Host(transport=launcher, subjects=subjects, clock=SystemClock(), id="launcher", instance_id="i")
    setattr(launcher, "subscribe", subscribed)  # noqa: B010  (a method)
    watch = MemberWatch(host)

    async def first() -> None:
        async with watch.watching():
            pass

    async def second() -> None:
        async with watch.watching(), asyncio.timeout(60):
            await watches[0]
            while not watch.is_ready(MODEL, SERVICES):
                for service in SERVICES:
                    await beat(others, subjects, service)
                await asyncio.sleep(0.01)

    watches = [asyncio.create_task(first())]
    await ending.wait()
    watches.append(asyncio.create_task(second()))
    await asyncio.sleep(0.01)
    ended.set()
    await asyncio.gather(*watches)


def test_a_version_that_cannot_take_images_is_refused_before_anything_starts(tmp_path: Path) -> None:
    first = ServeSettings(model=str(tmp_path), served_model_name="eye", enable_mm=True, device="cpu")
    plan = VersionPlan(models=[first], environ={}, place=Place("nats://127.0.0.1:1", "", ""))

    def refused() -> str:
        with pytest.raises(SettingsError) as error:
            plan.specs("eye", 2, str(tmp_path))
        return str(error.value)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "this model takes text only" in refused()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "architectures": ["Llava"]}))
    assert "has no preprocessor_config.json" in refused()
    (tmp_path / "preprocessor_config.json").write_text("[]")
    assert "has no JSON object" in refused()
    (tmp_path / "preprocessor_config.json").write_text("{")
    assert "is not a JSON object" in refused()
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert "has no *.safetensors" in refused()
    (tmp_path / "model.safetensors").touch()
    check_image_files(tmp_path)


async def test_an_order_reaches_a_launcher_that_joins_the_bus_a_moment_after_its_server_is_ready() -> None:
    bus, subjects = MemoryBus(), Subjects("antiphon")
    launcher, gateway = bus.connect("launcher"), bus.connect("gateway")
    versions = VersionDirectory(
        Host(transport=gateway, subjects=subjects, clock=SystemClock(), id="gateway", instance_id="i")
    )
    sent = asyncio.create_task(versions.order(ChangeModel(action="set", model="tiny", directory="/models/tiny-2")))
    await asyncio.sleep(0)
    version = ModelVersion(number=1, directory="/models/tiny", state="ready", created=0)
    state = ModelState(name="tiny", active=1, versions=(version,))
    reply = encode(ModelsChanged(ENCODER.encode(ModelStates(1, (state,)))))
    answers: list[asyncio.Task[None]] = []
    await launcher.subscribe(
        subjects.models_control(),
        lambda order: answers.append(asyncio.create_task(launcher.publish(order.reply, reply))),
    )
    await sent
    assert versions.states.find("tiny") == state


async def test_a_launcher_tells_the_gateways_that_a_process_has_ended() -> None:
    bus, subjects, told = MemoryBus(), Subjects("antiphon"), asyncio.Queue[bytes]()
    launcher, gateway = bus.connect("launcher"), bus.connect("gateway")
    await gateway.subscribe(subjects.ended(), lambda delivery: told.put_nowait(delivery.payload))
    notices = DeathNotices(
        Host(transport=launcher, subjects=subjects, clock=SystemClock(), id="launcher", instance_id="i")
    )
    notices.send(ChildSpec(name="nats", service="nats", argv=()))
    notices.send(ChildSpec(name="engine-1", service="engine", argv=(), member_id="host-7-engine-1"))
    message = Decoder([MemberEnded]).decode(await asyncio.wait_for(told.get(), 60))
    assert message == MemberEnded("engine", "host-7-engine-1")
    await notices.cancel()
    assert told.empty()
