"""The launcher's actor on the bus: starts versions of models, switches between them, loads and unloads models.

A new version starts beside the active one. When all its processes are ready it becomes active, and the gateways are
informed at once. Running requests stay with the version on which they began. The former version keeps running for a
while, for a rollback, and is stopped when it has no work. If a process of a starting version ends, the version has
failed: its processes are stopped, and nothing else changes.

A model that is loaded by an order is a model without an active version until its first version is ready. A model that
is unloaded has none any more: its versions end when they have no work.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from antiphon.shared.actors.actor import Actor, Envelope, handles
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.key_value import StoreUnavailableError
from antiphon.shared.deployment.model_versions import (
    DECODER,
    ENCODER,
    ModelState,
    ModelStates,
    ModelVersion,
    VersionStore,
    version_name,
)
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import ChangeModel, ModelsChanged
from antiphon.shared.subjects import LAUNCHER_QUEUE
from antiphon.supervision.fleet import Failure, Fleet
from antiphon.supervision.processes import ChildSpec, Sink
from antiphon.versions import orders
from antiphon.versions.watch import MemberWatch

log = logging.getLogger(__name__)
POLL_S = 0.1
IDLE_S = 2.0
"""An inactive version is stopped when its engines have had no sequences for this time, seconds."""
SYNC_S = 2.0
"""Interval in seconds at which the launcher rewrites state lost by the store and reads other launchers' changes."""
STOP_S = 10.0
LOOK_S = 1.0
"""Seconds for which heartbeats are awaited to see whether other launchers serve a model that failed here."""


Specs = Callable[[ModelState, ModelVersion, Sequence[ChildSpec]], Sequence[ChildSpec]]
"""Returns the processes of a version of a model beside the processes that run. Blocks. Raises SettingsError."""


async def run(
    host: Host, fleet: Fleet, sink: Sink, *, directories: Mapping[str, str], keep_s: float, specs: Specs
) -> None:
    """Executes orders until it is cancelled. Raises ServiceError if the bus cannot be used.

    `directories`: the directory with which each model was started, by served name. `keep_s`: seconds for which a former
    version keeps running.
    """
    actor = ModelSupervisor(host, fleet, sink, directories, keep_s, specs)
    try:
        await actor.listen()
        await asyncio.gather(actor.run(), actor.keep_in_sync())
    finally:
        await actor.cancel()


@dataclass(slots=True)
class _Running:
    """A version whose processes this launcher has started or is starting."""

    services: list[str] = field(default_factory=list[str])
    task: "asyncio.Task[None] | None" = None
    """Starts the version, or ends it when it is unused."""
    is_starting: bool = False

    def stop(self) -> None:
        """Cancels the task."""
        if self.task is not None:
            self.task.cancel()
        self.task, self.is_starting = None, False


class ModelSupervisor(Actor):
    """Manages the versions of one launcher's models."""

    def __init__(
        self, host: Host, fleet: Fleet, sink: Sink, directories: Mapping[str, str], keep_s: float, specs: Specs
    ) -> None:
        super().__init__(f"launcher {host.id}", host.transport)
        self._host, self._fleet, self._sink = host, fleet, sink
        self._store = VersionStore(host)
        self._watch = MemberWatch(host)
        self._states = ModelStates()
        self._directories, self._keep_s, self._specs = directories, keep_s, specs
        self._running = {(name, 1): _Running() for name in self._directories}
        self._pending_work: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Subscribes to orders and to changes by other launchers."""
        await self.bind(self._host.subjects.models_control(), ChangeModel, queue=LAUNCHER_QUEUE)
        await self.bind(self._host.subjects.models(), ModelsChanged)

    async def keep_in_sync(self) -> None:
        """Follows the store and rewrites lost state. Runs until cancelled."""
        warned, is_first = False, True
        while True:
            try:
                states = await self._store.read()
                wanted = _taken_back(states, self._directories) if is_first else states
                if wanted.changes > self._states.changes:
                    # Whoever led a start may have ended since, so at its own start a launcher leads it too.
                    self._follow(wanted, leads=is_first)
                    if wanted is not states:
                        await self._publish()
                elif states.changes < self._states.changes:
                    await self._store.write(self._states)
                warned = is_first = False
            except StoreUnavailableError as error:
                if not warned and self._states.changes:
                    self._sink("antiphon", f"the versions of models are not stored: {error}")
                warned = True
            await asyncio.sleep(SYNC_S)

    async def cancel(self) -> None:
        """Ends all tasks. The fleet stops the processes."""
        tasks = [one.task for one in self._running.values() if one.task is not None] + list(self._pending_work)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- orders ---

    @handles(ChangeModel)
    async def on_change(self, envelope: Envelope[ChangeModel]) -> ModelsChanged:
        """Executes an order or begins its execution. Raises ServiceError if it is invalid."""
        order = envelope.message
        served = orders.served(self._states, self._directories)
        if order.action == "load":
            await self._load(order.model, order.directory, order.settings)
        elif order.model not in served or not _starts_here(self._state(order.model), self._directories):
            known = ", ".join(map(repr, served))
            raise ServiceError("model_not_found", f"No model is called {order.model!r}. Models here: {known}.")
        elif order.action == "unload":
            await self._unload(order.model)
        elif order.action == "rollback":
            await self._roll_back(order.model)
        elif order.action == "unshadow":
            await self._end_shadow(order.model)
        else:
            await self._set(order.model, order.directory, order.share)
        return ModelsChanged(ENCODER.encode(self._states))

    @handles(ModelsChanged)
    def on_models_changed(self, envelope: Envelope[ModelsChanged]) -> None:
        """Applies a change made by another launcher."""
        message = envelope.message
        states = DECODER.decode(message.states)
        if states.changes > self._states.changes:
            self._follow(states)

    async def _set(self, name: str, directory: str, share: float) -> None:
        state = self._state(name)
        if (starting := state.starting) is not None:
            message = f"Version {starting.number} of {name!r} is starting ({starting.directory}): wait for it."
            raise ServiceError("invalid_value", message, param="model")
        if share and state.shadow is not None:
            message = f"{name!r} has a shadow already ({state.shadow.directory}): end it first, with --off."
            raise ServiceError("invalid_value", message, param="model")
        there = [one for one in state.versions if one.directory == directory and one.state == "ready"]
        if there and not share:
            await self._activate(name, there[-1].number)
            return
        version = _new_version(state, directory, share)
        await self._change(orders.with_version(state, version))
        self._bring_up(name, version, leads=True)

    async def _load(self, name: str, directory: str, settings: bytes) -> None:
        orders.check_load(self._states, self._directories, name)
        state = self._states.find(name)
        version = _new_version(state, directory)
        await self._change(orders.loading(state, name, version, settings))
        self._bring_up(name, version, leads=True)

    async def _unload(self, name: str) -> None:
        """Withdraws a model from clients at once, and ends its versions when they have no work."""
        orders.check_unload(self._states, self._directories, name)
        state = self._state(name)
        await self._change(orders.unloaded(state))
        for version in state.versions:
            if version.state == "starting" or version.share:
                await self._end(name, version.number, "ended", orders.UNLOADED)
            elif version.state == "ready":
                # A former version waits for a rollback, which nobody can order any more.
                self._running.setdefault((name, version.number), _Running()).stop()
        self._tend(self._state(name))

    async def _roll_back(self, name: str) -> None:
        state = self._state(name)
        former = state.version(state.former)
        if former is None or former.state != "ready":
            message = (
                f"The former version of {name!r} does not run any more." if former else f"{name!r} has no former one."
            )
            raise ServiceError("invalid_value", f"{message} Start one: antiphon models set {name}=DIR", param="model")
        await self._activate(name, former.number)

    async def _end_shadow(self, name: str) -> None:
        shadow = self._state(name).shadow
        if shadow is None:
            raise ServiceError("invalid_value", f"{name!r} has no shadow.", param="model")
        await self._end(name, shadow.number, "ended", "by order")

    # --- starting a version ---

    def _bring_up(self, name: str, version: ModelVersion, *, leads: bool) -> None:
        running = self._running[name, version.number] = _Running(is_starting=True)
        running.task = self._track(self._start(name, version, running, leads=leads))

    async def _start(self, name: str, version: ModelVersion, running: _Running, *, leads: bool) -> None:
        """Starts the processes of a version.

        `leads`: this launcher received the order and switches when the processes are ready.
        """
        internal = version_name(name, version.number)
        failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        try:
            specs = await asyncio.to_thread(self._specs, self._state(name), version, self._fleet.specs())
        except SettingsError as error:
            await self._end(name, version.number, "failed", str(error), leads=leads)
            return
        running.services = [spec.service for spec in specs]
        self._fleet.trials.add(internal)
        self._fleet.on_failure[internal] = lambda failure: None if failed.done() else failed.set_result(failure)
        async with self._watch.watching():
            self._fleet.start(specs)
            while not failed.done() and not self._watch.is_ready(internal, running.services):
                await asyncio.wait({failed}, timeout=POLL_S)
        self._fleet.trials.discard(internal)
        running.task, running.is_starting = None, False
        if failed.done():
            await self._end(name, version.number, "failed", failed.result().message, leads=leads)
            return
        self._fleet.on_failure[internal] = lambda failure: self._spawn(
            self._end(name, version.number, "ended", failure.message)
        )
        self._sink("antiphon", f"version {version.number} of {name} is ready ({version.directory})")
        if leads and version.share:
            ready = msgspec.structs.replace(version, state="ready")
            await self._change(orders.with_version(self._state(name), ready))
        elif leads:
            await self._activate(name, version.number)
        else:
            self._tend(self._state(name))

    async def _activate(self, name: str, number: int) -> None:
        """Sends new requests to a ready version. The version that received them before is ended later."""
        state = self._state(name)
        version = state.version(number)
        assert version is not None
        state = orders.with_version(state, msgspec.structs.replace(version, state="ready", share=0.0))
        if state.active != number:
            state = msgspec.structs.replace(state, active=number, former=state.active)
        await self._change(state)
        self._sink("antiphon", f"{name} is served by version {number} ({version.directory})")
        self._tend(state)

    async def _fail(self, name: str, number: int, failure: Failure) -> None:
        """Ends the active version of a loaded model that cannot go on. Unloads the model if nobody else serves it."""
        running, internal = self._running.get((name, number)), version_name(name, number)
        if running is None:  # it ends already, because of another process
            return
        await self._end(name, number, "failed", failure.message, leads=False)
        await self._fleet.stop_model(internal, STOP_S)
        async with self._watch.watching():
            await asyncio.sleep(LOOK_S)
            is_elsewhere = self._watch.is_ready(internal, set(running.services))
        state = self._state(name)
        if state.active == number and not is_elsewhere:
            version = next(one for one in state.versions if one.number == number)
            version = msgspec.structs.replace(version, state="failed", reason=failure.message)
            await self._change(orders.unloaded(orders.with_version(state, version)))

    # --- ending versions ---

    def _tend(self, state: ModelState) -> None:
        """Schedules the end of the unused versions of a model; keeps the active version and the shadow version."""
        for (name, number), running in self._running.items():
            version = state.version(number)
            if name != state.name or version is None or version.state == "starting" or running.is_starting:
                continue
            internal = version_name(name, number)
            if number == state.active:
                running.stop()
                self._fleet.on_failure.pop(internal, None)
                if state.settings:  # the server goes on without a model that was loaded
                    fail = functools.partial(self._fail, name, number)
                    self._fleet.on_failure[internal] = lambda failure, fail=fail: self._spawn(fail(failure))
            elif version.share and state.active:
                running.stop()
            elif running.task is None:
                self._fleet.on_failure[internal] = lambda failure, n=name, k=number: self._spawn(
                    self._end(n, k, "ended", failure.message)
                )
                running.task = self._track(self._end_when_unused(name, number))

    async def _end_when_unused(self, name: str, number: int) -> None:
        internal, idle_since = version_name(name, number), None
        version = self._state(name).version(number)
        if version is not None and version.state == "ready" and self._state(name).active:
            await asyncio.sleep(self._keep_s)
        async with self._watch.watching():
            idle_since = time.monotonic()
            while time.monotonic() - idle_since < IDLE_S:
                await asyncio.sleep(POLL_S)
                if not self._watch.is_idle(internal):
                    idle_since = time.monotonic()
        self._running[name, number].task = None
        reason = "another version has taken its place" if self._state(name).active else orders.UNLOADED
        await self._end(name, number, "ended", reason)

    async def _end(self, name: str, number: int, into: Any, reason: str, *, leads: bool = True) -> None:
        """Stops the processes of a version, and records why if this launcher `leads`."""
        state = self._state(name)
        version = state.version(number)
        running = self._running.pop((name, number), None)
        if running is not None and running.task is not None and running.task is not asyncio.current_task():
            running.task.cancel()
        # Another launcher may have made it active while its start failed here.
        is_active = version is not None and number == state.active
        if leads and version is not None and not is_active and version.state in ("starting", "ready"):
            ended = msgspec.structs.replace(version, state=into, reason=reason)
            await self._change(orders.with_version(state, ended))
        self._sink("antiphon", f"version {number} of {name} {into}: {reason}")
        self._spawn(self._fleet.stop_model(version_name(name, number), STOP_S))

    # --- the state ---

    def _state(self, name: str) -> ModelState:
        known = self._states.find(name)
        if known is not None:
            return known
        if name not in self._directories:
            return ModelState(name=name, active=0, versions=())
        version = ModelVersion(number=1, directory=self._directories[name], state="ready", created=int(time.time()))
        return ModelState(name=name, active=1, versions=(version,))

    async def _change(self, state: ModelState) -> None:
        """Publishes the state, then stores it. If the store does not answer, `keep_in_sync` repeats this later."""
        self._states = self._states.replaced(state)
        await self._publish()

    async def _publish(self) -> None:
        states = self._states
        await self.tell(self._host.subjects.models(), ModelsChanged(ENCODER.encode(states)))
        with contextlib.suppress(StoreUnavailableError):
            await self._store.write(states)

    def _follow(self, states: ModelStates, *, leads: bool = False) -> None:
        """Follows another launcher: starts the versions that it has started, and ends those that it has ended.

        `leads`: switches to versions that are starting when they are ready here, and records the end of unloaded ones.
        """
        self._states = states
        for name, number in list(self._running):
            if name not in self._directories and states.find(name) is None:
                self._spawn(self._end(name, number, "ended", orders.UNLOADED, leads=False))
        for state in states.models:
            if not _starts_here(self._state(state.name), self._directories):
                continue
            for version in state.versions:
                here = (state.name, version.number) in self._running
                is_wanted = version.state == "starting" or (version.state == "ready" and state.active)
                if is_wanted and not here:
                    self._bring_up(state.name, version, leads=leads and version.state == "starting")
                elif version.state == "ready" and not here and leads:
                    # The launcher that was to record the end of an unloaded model may have ended before it.
                    self._running[state.name, version.number] = _Running()
                elif version.state in ("failed", "ended") and here:
                    self._spawn(self._end(state.name, version.number, version.state, version.reason, leads=False))
            self._tend(state)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._pending_work.add(self._track(work))

    def _track(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: "asyncio.Task[None]") -> None:
        self._pending_work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._sink("antiphon", f"a version of a model could not be started or ended: {error!r}")


def _taken_back(states: ModelStates, directories: Mapping[str, str]) -> ModelStates:
    """Returns the states with the unloaded models with which the launcher was started. `directories`: of its models."""
    for state in states.models:
        if state.name in directories and not state.is_served:
            states = states.replaced(orders.taken_back(state, directories[state.name], int(time.time())))
    return states


def _starts_here(state: ModelState, directories: Mapping[str, str]) -> bool:
    """Whether a launcher starts the model's processes: it was started with it, or an order has loaded it."""
    return state.name in directories or bool(state.settings)


def _new_version(state: ModelState | None, directory: str, share: float = 0.0) -> ModelVersion:
    number = orders.next_number(state)
    return ModelVersion(number=number, directory=directory, state="starting", created=int(time.time()), share=share)
