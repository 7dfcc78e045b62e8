"""The launcher's actor on the bus: starts versions of models, switches between them, and ends unused ones.

A new version starts beside the active one. When all its processes are ready it becomes active, and the gateways are
informed at once. Running requests stay with the version on which they began. The former version keeps running for a
while, for a rollback, and is stopped when it has no work. If a process of a starting version ends, the version has
failed: its processes are stopped, and nothing else changes.
"""

import asyncio
import contextlib
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
    VERSIONS_MAX,
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
from antiphon.versions.watch import MemberWatch

log = logging.getLogger(__name__)
POLL_S = 0.1
IDLE_S = 2.0
"""An inactive version is stopped when its engines have had no sequences for this time, seconds."""
SYNC_S = 2.0
"""Interval in seconds at which the launcher rewrites state lost by the store and reads other launchers' changes."""
STOP_S = 10.0


Specs = Callable[[str, int, str], Sequence[ChildSpec]]
"""Returns the processes of a version, for a model's name, a number and a directory. Blocks. Raises SettingsError."""


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
        warned = False
        while True:
            try:
                states = await self._store.read()
                if states.changes > self._states.changes:
                    self._follow(states)
                elif states.changes < self._states.changes:
                    await self._store.write(self._states)
                warned = False
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
        if order.model not in self._directories:
            known = ", ".join(map(repr, self._directories))
            raise ServiceError("model_not_found", f"No model is called {order.model!r}. Models here: {known}.")
        if order.action == "rollback":
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
        if (starting := next((one for one in state.versions if one.state == "starting"), None)) is not None:
            message = f"Version {starting.number} of {name!r} is starting ({starting.directory}): wait for it."
            raise ServiceError("invalid_value", message, param="model")
        if share and state.shadow is not None:
            message = f"{name!r} has a shadow already ({state.shadow.directory}): end it first, with --off."
            raise ServiceError("invalid_value", message, param="model")
        there = [one for one in state.versions if one.directory == directory and one.state == "ready"]
        if there and not share:
            await self._activate(name, there[-1].number)
            return
        number = max(one.number for one in state.versions) + 1
        version = ModelVersion(
            number=number, directory=directory, state="starting", created=int(time.time()), share=share
        )
        await self._change(_with(state, version))
        self._bring_up(name, version, leads=True)

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
        running = self._running[name, version.number] = _Running()
        running.task = self._track(self._start(name, version, running, leads=leads))

    async def _start(self, name: str, version: ModelVersion, running: _Running, *, leads: bool) -> None:
        """Starts the processes of a version.

        `leads`: this launcher received the order and switches when the processes are ready.
        """
        internal = version_name(name, version.number)
        failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        try:
            specs = await asyncio.to_thread(self._specs, name, version.number, version.directory)
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
        running.task = None
        if failed.done():
            await self._end(name, version.number, "failed", failed.result().message, leads=leads)
            return
        self._fleet.on_failure[internal] = lambda failure: self._lost(name, version.number, failure)
        self._sink("antiphon", f"version {version.number} of {name} is ready ({version.directory})")
        if leads and version.share:
            await self._change(_with(self._state(name), msgspec.structs.replace(version, state="ready")))
        elif leads:
            await self._activate(name, version.number)

    async def _activate(self, name: str, number: int) -> None:
        """Sends new requests to a ready version. The version that received them before is ended later."""
        state = self._state(name)
        version = state.version(number)
        assert version is not None
        state = _with(state, msgspec.structs.replace(version, state="ready", share=0.0))
        if state.active != number:
            state = msgspec.structs.replace(state, active=number, former=state.active)
        await self._change(state)
        self._sink("antiphon", f"{name} is served by version {number} ({version.directory})")
        self._tend(state)

    def _lost(self, name: str, number: int, failure: Failure) -> None:
        """Handles a process of an inactive version that was given up."""
        self._spawn(self._end(name, number, "ended", failure.message))

    # --- ending versions ---

    def _tend(self, state: ModelState) -> None:
        """Schedules the end of the unused versions of a model; keeps the active version and the shadow version."""
        for (name, number), running in self._running.items():
            version = state.version(number)
            if name != state.name or version is None or version.state == "starting":
                continue
            internal = version_name(name, number)
            if number == state.active or version.share:
                if running.task is not None:
                    running.task.cancel()
                    running.task = None
                if number == state.active:
                    self._fleet.on_failure.pop(internal, None)
            elif running.task is None:
                self._fleet.on_failure[internal] = lambda failure, n=name, k=number: self._lost(n, k, failure)
                running.task = self._track(self._end_when_unused(name, number))

    async def _end_when_unused(self, name: str, number: int) -> None:
        internal, idle_since = version_name(name, number), None
        version = self._state(name).version(number)
        if version is not None and version.state == "ready":
            await asyncio.sleep(self._keep_s)
        async with self._watch.watching():
            idle_since = time.monotonic()
            while time.monotonic() - idle_since < IDLE_S:
                await asyncio.sleep(POLL_S)
                if not self._watch.is_idle(internal):
                    idle_since = time.monotonic()
        self._running[name, number].task = None
        await self._end(name, number, "ended", "another version has taken its place")

    async def _end(self, name: str, number: int, into: Any, reason: str, *, leads: bool = True) -> None:
        """Stops the processes of a version, and records why if this launcher `leads`."""
        state = self._state(name)
        version = state.version(number)
        running = self._running.pop((name, number), None)
        if running is not None and running.task is not None and running.task is not asyncio.current_task():
            running.task.cancel()
        if leads and version is not None and version.state in ("starting", "ready"):
            await self._change(_with(state, msgspec.structs.replace(version, state=into, reason=reason)))
        self._sink("antiphon", f"version {number} of {name} {into}: {reason}")
        self._spawn(self._fleet.stop_model(version_name(name, number), STOP_S))

    # --- the state ---

    def _state(self, name: str) -> ModelState:
        known = self._states.find(name)
        if known is not None:
            return known
        return ModelState(
            name,
            1,
            (ModelVersion(number=1, directory=self._directories[name], state="ready", created=int(time.time())),),
        )

    async def _change(self, state: ModelState) -> None:
        """Publishes the state, then stores it. If the store does not answer, `keep_in_sync` repeats this later."""
        self._states = self._states.replaced(state)
        await self.tell(self._host.subjects.models(), ModelsChanged(ENCODER.encode(self._states)))
        with contextlib.suppress(StoreUnavailableError):
            await self._store.write(self._states)

    def _follow(self, states: ModelStates) -> None:
        """Follows another launcher: starts the versions that it has started, and ends those that it has ended."""
        self._states = states
        for state in states.models:
            if state.name not in self._directories:
                continue
            for version in state.versions:
                here = (state.name, version.number) in self._running
                if version.state in ("starting", "ready") and not here:
                    self._bring_up(state.name, version, leads=False)
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


def _with(state: ModelState, version: ModelVersion) -> ModelState:
    """Returns the state with this version added or changed; the oldest ended ones are dropped beyond VERSIONS_MAX."""
    versions = [one for one in state.versions if one.number != version.number]
    versions = sorted([*versions, version], key=lambda one: one.number)
    over = [one for one in versions if one.state in ("failed", "ended")][: max(0, len(versions) - VERSIONS_MAX)]
    return msgspec.structs.replace(state, versions=tuple(one for one in versions if one not in over))
