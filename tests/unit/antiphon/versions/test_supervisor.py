"""What the launcher does with orders about models when processes or other launchers end at the wrong moment."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, cast

import pytest

from antiphon.services.gateway.path.models.versions import VersionDirectory
from antiphon.shared.actors.host import Host
from antiphon.shared.clock import SystemClock
from antiphon.shared.codec import encode
from antiphon.shared.deployment.model_versions import ModelState, ModelStates, ModelVersion, VersionStore, version_name
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import ChangeModel, PoolStatus, ServiceName, StreamStatus
from antiphon.shared.subjects import Subjects
from antiphon.supervision.fleet import Failure, Fleet
from antiphon.supervision.processes import ChildSpec
from antiphon.versions import orders, supervisor
from antiphon.versions.supervisor import ModelSupervisor
from tests.support.heartbeats import engine_status, heartbeat
from tests.support.memory import MemoryBus

END_S = 60.0
SERVICES: tuple[ServiceName, ...] = ("tokenizer", "engine", "detokenizer")
LOAD = ChangeModel(action="load", model="other", directory="/models/other", settings=b'{"model":"/models/other"}')


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POLL_S": 0.01, "IDLE_S": 0.1, "SYNC_S": 0.05, "LOOK_S": 0.3}.items():
        monkeypatch.setattr(supervisor, name, value)


class FakeFleet:
    """The processes of one launcher, of which none is real."""

    def __init__(self) -> None:
        self.trials, self.running = set[str](), list[ChildSpec]()
        self.on_failure: dict[str, Callable[[Failure], None]] = {}

    def start(self, specs: Iterable[ChildSpec]) -> None:
        self.running += specs

    def specs(self) -> list[ChildSpec]:
        return self.running

    async def stop_model(self, model: str, _grace_s: float) -> None:
        self.running = [spec for spec in self.running if spec.model != model]
        self.trials.discard(model)
        self.on_failure.pop(model, None)


class Launcher:
    """A launcher with one model, whose processes are ready when `ready` says so. Its heartbeats are on the bus."""

    def __init__(self, bus: MemoryBus, name: str = "launcher") -> None:
        self.bus, self.name, self.fleet, self.ready = bus, name, FakeFleet(), asyncio.Event()
        self.said, self.refused = list[str](), ""
        self.may_start = threading.Event()
        self.may_start.set()
        host = host_of(bus, name)
        self.actor = ModelSupervisor(
            host, cast(Fleet, self.fleet), self.print, {"tiny": "/models/tiny"}, 0.0, self.specs
        )

    def print(self, _name: str, line: str) -> None:
        self.said.append(line)

    def specs(self, state: ModelState, version: ModelVersion, _running: object) -> list[ChildSpec]:
        assert self.may_start.wait(END_S)
        if self.refused:
            raise SettingsError(self.refused)
        model = version_name(state.name, version.number)
        return [ChildSpec(name=service, service=service, argv=(), model=model) for service in SERVICES]

    async def beat(self) -> None:
        transport, subjects = self.bus.connect(f"{self.name}-services"), Subjects("antiphon")
        kinds: Mapping[str, Any] = {"tokenizer": PoolStatus, "engine": engine_status, "detokenizer": StreamStatus}
        sequence = 0
        while True:
            await self.ready.wait()
            sequence += 1
            for spec in self.fleet.running:
                member = f"{self.name}-{spec.model}-{spec.service}"
                status = kinds[spec.service](model=spec.model)
                service = cast(ServiceName, spec.service)
                message = heartbeat(service, member, "i", status, sequence=sequence)
                await transport.publish(subjects.heartbeat(service, member), encode(message))
            await asyncio.sleep(0.02)

    def models(self) -> set[str]:
        return {spec.model for spec in self.fleet.running}


def host_of(bus: MemoryBus, name: str) -> Host:
    clock = SystemClock()
    return Host(transport=bus.connect(name), subjects=Subjects("antiphon"), clock=clock, id=name, instance_id=name)


@contextlib.asynccontextmanager
async def running(launcher: Launcher, *, takes_orders: bool = True) -> AsyncIterator[None]:
    """Runs a launcher. One that takes no orders follows the others."""
    if takes_orders:
        await launcher.actor.listen()
    works = launcher.actor.run(), launcher.actor.keep_in_sync(), launcher.beat()
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        await launcher.actor.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        launcher.bus.crash(launcher.name)
        launcher.bus.crash(f"{launcher.name}-services")


class Gateway:
    """The versions that a gateway knows, read from the store."""

    def __init__(self, bus: MemoryBus) -> None:
        self.versions = VersionDirectory(host_of(bus, "gateway"))

    async def order(self, order: ChangeModel) -> None:
        await self.versions.order(order)

    async def until(self, condition: Callable[[ModelState], bool], name: str = "other") -> ModelState:
        """Waits for a state of a model."""
        async with asyncio.timeout(END_S):
            while True:
                await self.versions.read()
                state = self.versions.states.find(name)
                if state is not None and condition(state):
                    return state
                await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(END_S):
        while not condition():
            await asyncio.sleep(0.01)


def version(number: int, state: Any) -> ModelVersion:
    return ModelVersion(number=number, directory="/models/other", state=state, created=0)


async def test_a_loaded_model_that_cannot_go_on_is_unloaded_and_the_server_stays() -> None:
    bus = MemoryBus()
    launcher, gateway = Launcher(bus), Gateway(bus)
    async with running(launcher):
        launcher.ready.set()
        await gateway.order(LOAD)
        await gateway.until(lambda state: state.active == 1)
        assert (launcher.models(), launcher.fleet.trials) == ({"other"}, set())
        failure = Failure("other-engine-1 ends again and again", 1)
        tell = launcher.fleet.on_failure["other"]
        tell(failure)
        tell(failure)  # a second process of it ends
        state = await gateway.until(lambda state: not state.is_served)
        assert [(one.state, one.reason) for one in state.versions] == [("failed", failure.message)]
        await until(lambda: not launcher.models())
        assert not [line for line in launcher.said if "could not be started or ended" in line]


async def test_a_loaded_model_goes_on_at_another_launcher_when_it_cannot_at_the_first() -> None:
    bus = MemoryBus()
    one, two, gateway = Launcher(bus, "one"), Launcher(bus, "two"), Gateway(bus)
    async with running(one), running(two):
        one.ready.set()
        two.ready.set()
        await gateway.order(LOAD)
        await gateway.until(lambda state: state.active == 1)
        await until(lambda: "other" in one.fleet.on_failure and "other" in two.fleet.on_failure)
        await until(lambda: not one.fleet.trials | two.fleet.trials)
        one.fleet.on_failure["other"](Failure("it ends", 1))
        await until(lambda: one.models() == set())
        await asyncio.sleep(2 * supervisor.LOOK_S)
        assert (await gateway.until(lambda _: True)).active == 1
        assert two.models() == {"other"}


async def test_a_launcher_that_is_late_to_start_a_model_starts_it_although_it_is_active_meanwhile() -> None:
    bus = MemoryBus()
    one, late, gateway = Launcher(bus, "one"), Launcher(bus, "late"), Gateway(bus)
    late.may_start.clear()  # it downloads the model
    async with running(one), running(late, takes_orders=False):
        await asyncio.sleep(2 * supervisor.SYNC_S)  # It has read the store, which is empty.
        one.ready.set()
        late.ready.set()
        await gateway.order(LOAD)
        await gateway.until(lambda state: state.active == 1)
        await asyncio.sleep(2 * supervisor.SYNC_S)
        assert late.models() == set()
        late.may_start.set()
        await until(lambda: late.models() == {"other"} and not late.fleet.trials and "other" in late.fleet.on_failure)


async def test_a_launcher_that_starts_again_ends_what_it_had_begun_to_load_and_to_unload() -> None:
    bus = MemoryBus()
    begun = orders.loading(None, "other", version(1, "starting"), LOAD.settings)
    left = ModelState(name="left", active=0, versions=(version(1, "ready"),), settings=LOAD.settings)
    first = orders.unloaded(ModelState(name="tiny", active=1, versions=(version(1, "ended"),)))
    await VersionStore(host_of(bus, "earlier")).write(ModelStates().replaced(begun).replaced(left).replaced(first))
    launcher, gateway = Launcher(bus), Gateway(bus)
    async with running(launcher):
        launcher.ready.set()
        assert (await gateway.until(lambda state: state.active == 1)).versions[0].state == "ready"
        state = await gateway.until(lambda state: state.versions[0].state == "ended", "left")
        assert state.versions[0].reason == orders.UNLOADED
        assert (await gateway.until(lambda state: state.active == 1, "tiny")).versions[0].state == "ready"
        assert launcher.models() == {"other"}


async def test_a_model_that_is_unloaded_while_it_starts_leaves_no_processes() -> None:
    bus = MemoryBus()
    launcher, gateway = Launcher(bus), Gateway(bus)
    async with running(launcher):
        await gateway.order(LOAD)
        await until(lambda: launcher.models() == {"other"})
        with pytest.raises(ServiceError, match="'other' is being loaded already"):
            await gateway.order(LOAD)
        await gateway.order(ChangeModel(action="unload", model="other"))
        assert [one.state for one in (await gateway.until(lambda _: True)).versions] == ["ended"]
        await until(lambda: not launcher.models())
        launcher.refused = "settings: no such model"
        await gateway.order(LOAD)
        state = await gateway.until(lambda state: state.starting is None)
        assert (state.active, state.versions[-1].reason) == (0, "settings: no such model")
        with pytest.raises(ServiceError, match=r"No model is called 'other'\. Models here: 'tiny'\."):
            await gateway.order(ChangeModel(action="unload", model="other"))
