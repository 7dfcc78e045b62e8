"""`antiphon serve`: the bus, the gateways and the services of each model as child processes of one command.

Starts all processes at once, prints a message when the server is ready, restarts processes that end
(`antiphon.supervision.fleet`), and stops them in order: gateways first, so that no new requests arrive; then the other
services, which finish their running work; the bus last. This module imports no service, so that the command starts fast
and a crash of a service does not affect the launcher.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.launch import devices, nats_server, other_machine, sockets
from antiphon.launch.file_checks import check_files
from antiphon.launch.output import Output, flush, print_line, use_format
from antiphon.launch.readiness import ServerAddress, announce, say_hosted
from antiphon.launch.run_directory import run_directory
from antiphon.launch.served_models import loaded_model, models_of, version_of
from antiphon.settings import (
    MODEL_SERVICES,
    SERVICES,
    ServeSettings,
    check,
    child_environment,
    engine_roles,
    of_role,
)
from antiphon.shared import limits
from antiphon.shared.actors import standby
from antiphon.shared.actors.descriptors import raise_limit
from antiphon.shared.actors.python_command import python_command
from antiphon.shared.distributed import world
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError, converted, to_argv
from antiphon.shared.models.model_files import given_model, located, model_name
from antiphon.shared.security import bus_permissions, tls
from antiphon.shared.settings.kv_events import of_replica
from antiphon.shared.settings.records import KeeperSettings
from antiphon.shared.subjects import model_token, safe_token
from antiphon.supervision.fleet import CONFIGURATION_ERROR, Failure, Fleet
from antiphon.supervision.processes import ChildSpec

if TYPE_CHECKING:
    from antiphon.shared.deployment.model_versions import ModelState, ModelVersion

GRACE_S = limits.DRAIN_S + 5.0
"""Seconds that a service has to drain before it is killed."""
FAILURE_GRACE_S = 5.0
"""Seconds that a service has to end after a failure of the fleet: running requests cannot be completed any more."""
BUS_GRACE_S = 3.0
STANDBY = {
    "engine": "antiphon.services.engine.service,antiphon.services.engine.backends.load",
    "gateway": "antiphon.services.gateway.service",
}
"""Services whose replicas have standbys (`--standby`), and the modules that a standby imports. The other services start
in a fraction of the time."""
STARTED_FIRST = ("nats", "engine")
"""Services whose processes are started before the others: the bus, and those that take longest to become ready."""
BUS_WAIT_S = 10.0
"""Seconds after the start from which versions of models can be changed although the server is not ready yet."""
FORCED = 130
"""Exit code after a second Ctrl-C, which kills the children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPlan:
    """What is needed to start another version of a model, or another model.

    `gpus`: as in `make_plan`; `visible`: all visible GPUs; `common`: the settings of the command line, for
    models that are loaded; None: none can be loaded.
    """

    models: list[ServeSettings]
    environ: Mapping[str, str]
    place: "Place"
    gpus: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    common: ServeSettings | None = None

    def specs(self, name: str, number: int, directory: str) -> list[ChildSpec]:
        """Returns the processes of a version of a model. Blocks; a download from the hub may take long.

        Raises SettingsError.

        The version has the settings of the model, except those that name the model's files. It gets unused GPUs; if
        there are none, it shares those of the model.
        """
        # Imported here because it imports the libraries of the bus.
        from antiphon.shared.deployment.model_versions import version_name

        first = next(model for model in self.models if model_name(model) == name)
        model = self._located(version_of(first, directory), version_name(name, number))
        gpus = self._gpus(name, model)
        return list(_model_specs([model], self.environ, self.place, gpus, _num_engines(self.models)))

    def loaded(
        self, name: str, number: int, directory: str, entry: Mapping[str, object], running: Sequence[ChildSpec]
    ) -> list[ChildSpec]:
        """Returns the processes of a version of a model that an order has loaded, as `specs` does.

        `entry`: the settings of the order, as in a file of models. `running`: all processes here; the model gets GPUs
        that none of them uses or, if there are too few, those that the fewest use.
        """
        from antiphon.shared.deployment.model_versions import version_name

        if self.common is None:
            raise SettingsError("this server was started with a role, and loads no further models")
        model = loaded_model(self.common, name, entry, self.models)
        if directory != given_model(model):
            model = version_of(model, directory)
        model = self._located(model, version_name(name, number))
        world.check_devices(model.parallel, model.engines, len(self.visible))
        needed = [world.local_size(model.parallel) for _ in engine_roles(model)]
        on_cpu = model.execution.device == "cpu" or not self.visible
        gpus = () if on_cpu else devices.beside(needed, self.visible, self._used(running))
        engines = len(needed) + sum(spec.service == "engine" for spec in running)
        return list(_model_specs([model], self.environ, self.place, gpus, engines))

    def of_version(
        self, state: "ModelState", version: "ModelVersion", running: Sequence[ChildSpec]
    ) -> Sequence[ChildSpec]:
        """Returns the processes of a version of any model: see `specs` and `loaded`."""
        if not state.settings:
            return self.specs(state.name, version.number, version.directory)
        return self.loaded(state.name, version.number, version.directory, json.loads(state.settings), running)

    def _located(self, model: ServeSettings, internal: str) -> ServeSettings:
        model = replace(located(model), served_model_name=internal)
        check(model)
        check_files(model, self.environ)
        return model

    def _used(self, running: Sequence[ChildSpec]) -> Iterator[str]:
        """Yields the GPUs of the running engines. One that chose its own takes the first ones."""
        everywhere = self.environ.get(devices.VARIABLE)
        for spec in running:
            given = (spec.environ or {}).get(devices.VARIABLE)
            if spec.service == "engine" and given != everywhere and given:
                yield from given.split(",")
            elif spec.service == "engine":
                names = spec.model, spec.model.rpartition("@")[0]  # of a model, or of a version of it
                for model in self.models:
                    if model_name(model) in names and model.execution.device != "cpu":
                        yield from self.visible[: world.local_size(model.parallel)]

    def _gpus(self, name: str, model: ServeSettings) -> Sequence[str]:
        taken = {one for ids in self.gpus for one in ids.split(",")}
        try:
            return assign_gpus([model], [one for one in self.visible if one not in taken]).ids
        except SettingsError:
            ids = iter(self.gpus)
            own = {
                model_name(one): [next(ids) for _ in engine_roles(one) if one.execution.device != "cpu"]
                for one in self.models
            }
            return own[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The children to start, and the address and models of the resulting server."""

    specs: list[ChildSpec]
    host: str
    port: int
    """0: there are no gateways here, but on the same bus."""
    models: list[str]
    """Served names, the default one first."""
    token: str
    """An API key for the launcher's own requests; empty if the server needs none."""
    https: bool = False
    openai: bool = True
    """Whether gateways offer OpenAI's API."""
    engines: int = 0
    """Number of engines that must be ready before the server is; 0: one of each model is enough."""
    versions: "VersionPlan | None" = None
    """Starts further versions of the models; None: not supported."""
    stores: KeeperSettings | None = None
    """For the task that makes the logs and stores of the bus."""


def serve(settings: ServeSettings, environ: Mapping[str, str]) -> int:
    """Runs the server until a signal or a failure, and returns the exit code.

    Raises SettingsError before any process has started.
    """
    use_format(settings.log_format)
    try:
        return _serve(settings, environ)
    finally:
        flush()


def _serve(settings: ServeSettings, environ: Mapping[str, str]) -> int:
    models = models_of(settings)
    visible = devices.visible(environ)
    models = [other_machine.divided(model, visible) for model in models]
    for model in models:
        world.check_devices(model.parallel, model.engines, len(visible))
        check(model)
    machines = other_machine.machines_of(models)
    gpus = assign_gpus(models, visible)
    models = located_models(models, environ)
    for notice in gpus.notices:
        print_line("antiphon", notice)
    if machines is not None and not machines.is_head:
        ranks = list(other_machine.rank_specs(models, machines, environ, gpus.ids))
        return asyncio.run(other_machine.run(ranks, machines, print_line, signalled))
    binary = "" if settings.nats else nats_server.find_binary()
    with contextlib.ExitStack() as stack:
        gateways = settings.gateways
        listeners = sockets.listen(settings.host, settings.port, gateways) if gateways else []
        stack.callback(sockets.close, listeners)
        directory = stack.enter_context(run_directory())
        plan = make_plan(models, environ, listeners, directory, binary, gpus.ids)
        if plan.versions is not None:
            plan = replace(plan, versions=replace(plan.versions, visible=tuple(visible), common=settings))
        return asyncio.run(run_plan(plan, listeners))


def located_models(models: Sequence[ServeSettings], environ: Mapping[str, str]) -> list[ServeSettings]:
    """Returns the settings with the models' files at local paths, and prints notices. Raises SettingsError."""
    models = [located(model) for model in models]
    for model in models:
        check_files(model, environ)
    for notice in dict.fromkeys(notice for model in models for notice in world.notices(model.parallel)):
        print_line("antiphon", notice)
    return models


@dataclass(frozen=True, slots=True)
class Place:
    """The bus that the children of one launcher use. `prefix` is the beginning of their member ids on this bus.

    `bus`: the launcher's own bus, with separate credentials for each child; None: all children use `credentials`, or
    those of their service if this is a directory.
    """

    nats: str
    credentials: str
    prefix: str
    bus: nats_server.Bus | None = None

    def credentials_of(self, role: bus_permissions.Role) -> str:
        """Returns the file with the password of a role on a bus that the launcher has not started."""
        directory = Path(self.credentials)
        return str(directory / role / "credentials") if self.credentials and directory.is_dir() else self.credentials


def make_plan(
    models: Sequence[ServeSettings],
    environ: Mapping[str, str],
    listeners: list[socket.socket],
    directory: Path,
    nats_binary: str,
    gpus: Sequence[str] = (),
    bus: nats_server.Bus | None = None,
) -> Plan:
    """Returns the specifications of all children and the address of the server.

    `models` has the settings of each model; settings of gateways and of the bus are the same in all of them.
    `nats_binary` is empty if an existing bus is used. `gpus` has one GPU for each engine that is not set to
    `--device=cpu`. `bus` is the bus that `nats_binary` runs (default: one on 127.0.0.1).
    """
    specs: list[ChildSpec] = []
    first, names = models[0], [model_name(model) for model in models]
    place = Place(first.nats, first.nats_credentials, _member_prefix())
    if nats_binary:
        bus = bus or nats_server.prepare(directory, namespace=first.namespace, store=_bus_store(first))
        place = Place(bus.address, "", "", bus)
        specs.append(_bus_spec(bus, nats_binary, environ))
    sockets_of_gateways = [each.fileno() for each in listeners[: first.gateways]]
    # A key file may contain only digests, so the launcher needs a key of its own for its requests.
    own_key = secrets.token_urlsafe(24) if first.api_keys_file and not first.api_keys else ""
    files = first.files_directory or str(directory / "files")
    specs += [
        _gateway_spec(index, models, environ, place, sockets_of_gateways, own_key=own_key, files_directory=files)
        for index in range(len(sockets_of_gateways))
    ]
    specs += _model_specs(models, environ, place, gpus)
    if place.bus:
        place.bus.write()
    host, port = listeners[0].getsockname()[:2] if listeners else ("", 0)
    default = first.default_model
    ordered = sorted(names, key=lambda name: bool(default) and name != default)
    token = own_key or first.api_keys.split(",")[0].strip()
    # The server would also work with engines of one role only, but without disaggregation, so it waits for all engines.
    engines = _num_engines(models) if any(model.prefill for model in models) else 0
    versions = VersionPlan(models=list(models), environ=environ, place=place, gpus=tuple(gpus))
    # Without gateways here, whoever starts them makes the stores.
    stores = _keeper_settings(first, place) if listeners else None
    return Plan(
        specs=specs,
        host=host,
        port=port,
        models=ordered,
        token=token,
        https=bool(first.ssl_certfile),
        openai=first.use_openai,
        engines=engines,
        versions=versions,
        stores=stores,
    )


def _keeper_settings(settings: ServeSettings, place: Place) -> KeeperSettings:
    credentials = place.bus.credentials(nats_server.SETUP) if place.bus else place.credentials_of("setup")
    name = nats_server.SETUP if place.bus else place.prefix + nats_server.SETUP
    return converted(settings, KeeperSettings, nats=place.nats, nats_credentials=credentials, service_id=name)


def _bus_spec(bus: nats_server.Bus, binary: str, environ: Mapping[str, str]) -> ChildSpec:
    def prepare() -> None:
        if notice := bus.make_way():
            print_line("antiphon", notice)

    own = nats_server.environment(child_environment(environ))
    argv = [binary, "-c", str(bus.config)]
    return ChildSpec(
        name="nats", service="nats", argv=argv, environ=own, prepare=prepare, show=nats_server.worth_showing
    )


def _bus_store(settings: ServeSettings) -> Path | None:
    return Path(settings.bus_directory).absolute() if settings.bus_directory else None


def _gateway_spec(
    index: int,
    models: Sequence[ServeSettings],
    environ: Mapping[str, str],
    place: Place,
    descriptors: Sequence[int],
    *,
    own_key: str,
    files_directory: str,
) -> ChildSpec:
    settings = models[0]
    own, others = descriptors[index], [*descriptors[:index], *descriptors[index + 1 :]]
    changes: dict[str, object] = {"listen_fd": own, "other_listen_fds": ",".join(map(str, others))}
    changes |= {"api_keys": "", "launcher_key": "", "usage_sink": ""}
    # All gateways have the same files; a restarted gateway continues its batches.
    changes |= {"files_directory": files_directory}
    changes |= {"default_model": settings.default_model or model_name(settings)}
    # Gateways with the same seed would derive the same seeds for their requests.
    changes |= {"seed": None if settings.seed is None else settings.seed + index}
    changes |= {"return_token_ids": settings.return_token_ids or any(model.skip_tokenizer_init for model in models)}
    secret = {
        "OPENAI_API_KEYS": settings.api_keys,
        "ANTIPHON_LAUNCHER_KEY": own_key,
        "ANTIPHON_USAGE_SINK": settings.usage_sink,
    }
    secret = {name: value for name, value in secret.items() if value}
    spec = service_spec("gateway", f"gateway-{index + 1}", settings, changes, {**environ}, place, secret)
    return replace(spec, pass_fds=(own, *others))


def _model_specs(
    models: Sequence[ServeSettings],
    environ: Mapping[str, str],
    place: Place,
    gpus: Sequence[str],
    of_all: int = 0,
) -> Iterator[ChildSpec]:
    """Yields the processes of each model: tokenizers, engines, detokenizers, and image services with `--enable-mm`.

    The processes of the first model have plain names (`engine-1`); for other models, or if other models run beside
    them, the model's name comes first. `of_all`: the number of engines with those of the models beside them; 0: none.
    """
    free, port, num_engines = iter(gpus), models[0].parallel.master_port, 0
    engines = of_all or _num_engines(models)
    for number, model in enumerate(models):
        name = model_name(model)
        prefix = f"{model_token(name)}-" if number or of_all else ""
        changes: dict[str, object] = {"threads": engine_threads(model, engines)}
        for service in MODEL_SERVICES:
            for child, role in _replicas(service, model):
                on_gpu = service == "engine" and gpus and model.execution.device != "cpu"
                own = {devices.VARIABLE: next(free)} if on_gpu else {}
                settings = of_role(model, role) if model.prefill else model
                if service == "engine":
                    # The ranks on the other machines derive this engine's port by the same numbering.
                    changes["master_port"], port = port, port + 1
                    changes["kv_events_config"] = of_replica(model.cache.kv_events_config, num_engines)
                    disks = model.cache.kv_disk_path.split(",")
                    changes["kv_disk_path"] = disks[num_engines % len(disks)].strip()
                    num_engines += 1
                spec = service_spec(service, prefix + child, settings, changes, {**environ, **own}, place)
                yield replace(spec, model=name)


def _num_engines(models: Sequence[ServeSettings]) -> int:
    return sum(len(engine_roles(model)) for model in models)


def _replicas(service: str, model: ServeSettings) -> list[tuple[str, str]]:
    """Returns the name of each process of one model's service, with the role for engines."""
    if service == "engine":
        return engine_roles(model)
    if service == "vision" and not model.enable_mm:
        return []
    return [(f"{service}-{index + 1}", model.kv_transfer.role) for index in range(getattr(model, f"{service}s"))]


def service_spec(
    service: str,
    name: str,
    settings: ServeSettings,
    changes: Mapping[str, object],
    environ: Mapping[str, str],
    place: Place,
    secret: Mapping[str, str] | None = None,
) -> ChildSpec:
    """Returns the child process of a service.

    `changes` overrides single settings; `secret`: environment variables that must not be on a command line.
    """
    member_id = safe_token(place.prefix + name, limits.MEMBER_ID_CHARS_MAX)
    # API keys and URLs that may contain a password are passed in the environment, because every user of the machine can
    # read command lines.
    role = bus_permissions.role(service)
    credentials = place.bus.join(role, member_id) if place.bus else place.credentials_of(role)
    where: dict[str, object] = {"service_id": member_id, "nats": "", "nats_credentials": credentials}
    flags = to_argv(converted(settings, SERVICES[service], **where, **changes))
    command = [f"antiphon.services.{service}", *flags]
    own = child_environment(environ, ANTIPHON_NATS=place.nats, **(secret or {}))
    spec = ChildSpec(name=name, service=service, argv=python_command(*command), environ=own, member_id=member_id)
    if not _stands_by(service, settings):
        return spec
    return replace(spec, standby_argv=python_command(standby.MODULE, STANDBY[service], *command))


def _stands_by(service: str, settings: ServeSettings) -> bool:
    """Whether the processes of a service have standbys: by default if there are several."""
    if service not in STANDBY or settings.standby == "off":
        return False
    count = settings.gateways if service == "gateway" else len(engine_roles(settings))
    return count > 1 or settings.standby == "on"


def assign_gpus(models: Sequence[ServeSettings], visible: Sequence[str]) -> devices.Assignment:
    """Assigns a GPU to each engine of all models that are not set to `--device=cpu`. Raises SettingsError."""
    needed = [
        world.local_size(model.parallel)
        for model in models
        if model.execution.device != "cpu"
        for _ in engine_roles(model)
    ]
    return devices.for_engines(needed, "auto" if needed else "cpu", visible)


def engine_threads(settings: ServeSettings, engines: int) -> int:
    """Returns the number of threads for each engine of a model: `--threads`, or an equal share of the cores.

    `engines` is the number of engines of all models. Returns 0 for at most one engine without `--threads`: the engine
    then decides.
    """
    if settings.execution.threads or engines <= 1:
        return settings.execution.threads
    return max(1, len(os.sched_getaffinity(0)) // engines)


def _member_prefix() -> str:
    """Returns the prefix that distinguishes this launcher's member ids from those of others on a shared bus."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', socket.gethostname())[:32]}-{os.getpid()}-"


async def run_plan(
    plan: Plan, listeners: list[socket.socket], beside: Callable[[], Awaitable[Failure]] | None = None
) -> int:
    """Runs the children until the first signal or until they fail, and returns the exit code.

    `listeners`: the gateways' sockets, which are closed before the children are stopped. `beside` runs concurrently;
    the failure that it returns stops the server.
    """
    raise_limit()
    output = Output()
    fleet = Fleet(output.print)
    stop = asyncio.create_task(signalled(fleet))
    fleet.start(sorted(plan.specs, key=lambda spec: spec.service not in STARTED_FIRST))
    announcing = asyncio.create_task(_announce(plan, fleet))
    wanted = plan.versions
    versions = None if wanted is None else asyncio.create_task(_use_bus(fleet, wanted, announcing))
    stores = None if plan.stores is None else asyncio.create_task(_keep_stores(plan.stores))
    companion = asyncio.ensure_future(beside()) if beside else asyncio.get_running_loop().create_future()
    try:
        await asyncio.wait({stop, fleet.failed, companion}, return_when=asyncio.FIRST_COMPLETED)
        failure = next((each.result() for each in (fleet.failed, companion) if each.done()), None)
        announcing.cancel()
        for task in (versions, stores):
            if task is not None:
                task.cancel()
        sockets.close(listeners)
        # What the other services say about their end would bury the reason.
        output.only_problems = failure is not None and failure.exit_code == CONFIGURATION_ERROR
        await _shut_down(fleet, failure)
        return failure.exit_code if failure else (FORCED if fleet.killed else 0)
    finally:
        fleet.kill()
        tasks = [task for task in (stop, announcing, companion, versions, stores) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _announce(plan: Plan, fleet: Fleet) -> None:
    if not plan.port:
        say_hosted(plan.models, print_line)
        return
    place = ServerAddress(host=plan.host, port=plan.port, token=plan.token, https=plan.https, openai=plan.openai)
    await announce(place, plan.models, fleet.pids, print_line, plan.engines)


async def _keep_stores(settings: KeeperSettings) -> None:
    # Imported here because it imports the libraries of the bus, for which the start of the children need not wait.
    from antiphon.shared.deployment.store_keeper import keep

    def tell(problem: str) -> None:
        print_line("antiphon", problem)

    try:
        await keep(settings, tell)
    except Exception as error:  # services work without the stores, as far as they can
        told = error if isinstance(error, ServiceError | SettingsError) else repr(error)
        tell(f"the stores of the bus are not made before the next start: {told}")


async def _use_bus(fleet: Fleet, plan: VersionPlan, announcing: "asyncio.Task[None]") -> None:
    """Announces deaths of processes on the bus, and takes orders about versions from it. Runs until cancelled."""
    # Until the server is ready the children need the processor. If one model does not become ready, it must
    # nevertheless be possible to change that model's version.
    await asyncio.wait({announcing}, timeout=BUS_WAIT_S)
    from antiphon.supervision.death_notice import BusAddress, announced_deaths
    from antiphon.versions import supervisor

    bus, name = plan.place.bus, f"{plan.place.prefix}{nats_server.LAUNCHER}"
    credentials = plan.place.credentials_of("launcher") if bus is None else bus.credentials(nats_server.LAUNCHER)
    first = plan.models[0]
    where = BusAddress(
        url=plan.place.nats, credentials=credentials, name=name, namespace=first.namespace, tls=tls.bus_context(first)
    )
    directories = {model_name(model): given_model(model) for model in plan.models}
    keep_s = first.keep_former_version

    def tell(error: Exception) -> None:
        told = error if isinstance(error, ServiceError | SettingsError) else repr(error)
        print_line("antiphon", f"versions of models cannot be changed until the next start: {told}")

    try:
        async with announced_deaths(fleet, where) as host:
            try:
                await supervisor.run(
                    host, fleet, print_line, directories=directories, keep_s=keep_s, specs=plan.of_version
                )
            except Exception as error:  # the server continues without changes of versions; deaths are still announced
                tell(error)
                await asyncio.get_running_loop().create_future()
    except Exception as error:  # the server continues; gateways notice deaths by missing heartbeats
        tell(error)


async def _shut_down(fleet: Fleet, failure: Failure | None) -> None:
    grace_s = FAILURE_GRACE_S if failure else GRACE_S
    print_line("antiphon", f"stopping: {failure.message}" if failure else "stopping (Ctrl-C again: at once)")
    await fleet.stop(("gateway",), grace_s)
    await fleet.stop(MODEL_SERVICES, grace_s)
    await fleet.stop(("nats",), BUS_GRACE_S)
    print_line("antiphon", f"stopped: {failure.message}" if failure else "stopped")


async def signalled(fleet: Fleet) -> None:
    """Waits for the first signal to stop. Every further signal kills the children."""
    first = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if first.is_set():
            fleet.kill()
        first.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    await first.wait()
