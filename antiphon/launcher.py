"""`antiphon serve`: the bus and the four services as child processes of one command.

Starts everything at once, says when it is ready, keeps it running (`antiphon.fleet`), and stops it in order: gateways
first, so that nothing new comes in; then the services, which finish what they hold; the bus last. No service is
imported here: the command stays light, and a service that crashes takes nobody with it.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon import devices, nats_server, sockets
from antiphon.fleet import Failure, Fleet
from antiphon.processes import ChildSpec
from antiphon.readiness import ServerAddress, announce
from antiphon.run_directory import run_directory
from antiphon.settings import SERVICES, ServeSettings, check, child_environment, of_service
from shared import limits
from shared.config import to_argv
from shared.model_files import located

GRACE_S = limits.DRAIN_S + 5.0
"""For a service to drain before it is killed."""
FAILURE_GRACE_S = 5.0
"""The same when the fleet has failed: there is nothing left to finish well."""
BUS_GRACE_S = 3.0
BACK_SERVICES = ("tokenizer", "engine", "detokenizer")
FORCED = 130
"""Exit code after a second Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start, and where it will be found."""

    specs: list[ChildSpec]
    host: str
    port: int
    token: str
    """A key that the launcher's own requests can use; empty when none is needed."""
    https: bool = False


def serve(settings: ServeSettings, environ: Mapping[str, str]) -> int:
    """Runs until it is told to stop; the exit code. Raises SettingsError before anything has started."""
    check(settings)
    gpus = devices.for_engines(settings.engines, settings.device, devices.visible(environ))
    settings = located(settings)
    for notice in gpus.notices:
        _print_line("antiphon", notice)
    binary = "" if settings.nats else nats_server.find_binary()
    with contextlib.ExitStack() as stack:
        listeners = sockets.listen(settings.host, settings.port, settings.gateways)
        stack.callback(sockets.close, listeners)
        plan = make_plan(settings, environ, listeners, stack.enter_context(run_directory()), binary, gpus.ids)
        return asyncio.run(_run(plan, lambda: sockets.close(listeners)))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the children of one launcher meet. `prefix` starts their names on the bus."""

    nats: str
    credentials: str
    prefix: str


def make_plan(
    settings: ServeSettings,
    environ: Mapping[str, str],
    listeners: list[socket.socket],
    directory: Path,
    nats_binary: str,
    gpus: Sequence[str] = (),
) -> Plan:
    """All children. `nats_binary` is empty when the bus is somewhere else already; `gpus`: one for each engine."""
    specs: list[ChildSpec] = []
    place = _Place(settings.nats, settings.nats_credentials, _member_prefix())
    if nats_binary:
        bus = nats_server.prepare(directory)
        place = _Place(bus.url, str(bus.credentials), "")
        argv = [nats_binary, "-c", str(bus.config)]
        own = nats_server.environment(child_environment(environ))
        specs.append(ChildSpec("nats", "nats", argv, own, show=nats_server.worth_showing))
    for service in SERVICES:
        for index in range(getattr(settings, f"{service}s")):
            inherited = listeners[index].fileno() if service == "gateway" else -1
            own = {devices.VARIABLE: gpus[index]} if service == "engine" and gpus else {}
            specs.append(_service_spec(service, index, settings, {**environ, **own}, place, inherited))
    host, port = listeners[0].getsockname()[:2]
    return Plan(specs, host, port, settings.api_keys.split(",")[0].strip(), bool(settings.ssl_certfile))


def _service_spec(
    service: str, index: int, settings: ServeSettings, environ: Mapping[str, str], place: _Place, listen_fd: int
) -> ChildSpec:
    name = f"{service}-{index + 1}"
    changes: dict[str, object] = {"service_id": place.prefix + name, "nats_credentials": place.credentials}
    changes |= {"listen_fd": listen_fd, "threads": engine_threads(settings)}
    # Keys, and an URL with a password, go through the environment: every user of the machine can read command lines.
    changes |= {"nats": "", "api_keys": ""}
    # Gateways with the same seed would give their first requests the same one.
    changes |= {"seed": None if settings.seed is None else settings.seed + index}
    changes |= {"return_token_ids": settings.return_token_ids or settings.skip_tokenizer_init}
    secret = {"ANTIPHON_NATS": place.nats}
    if service == "gateway" and settings.api_keys:
        secret["OPENAI_API_KEYS"] = settings.api_keys
    flags = to_argv(of_service(settings, SERVICES[service], **changes))
    argv = [sys.executable, "-m", f"services.{service}", *flags]
    fds = (listen_fd,) if listen_fd >= 0 else ()
    return ChildSpec(name, service, argv, child_environment(environ, **secret), fds)


def engine_threads(settings: ServeSettings) -> int:
    """Threads of each engine: as told, else an equal share of the cores; 0 lets a single engine decide."""
    if settings.threads or settings.engines == 1:
        return settings.threads
    return max(1, len(os.sched_getaffinity(0)) // settings.engines)


def _member_prefix() -> str:
    """Tells this launcher's members from others' on a shared bus."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', socket.gethostname())[:32]}-{os.getpid()}-"


async def _run(plan: Plan, stop_listening: Callable[[], None]) -> int:
    fleet = Fleet(_print_line)
    stop = asyncio.create_task(_signalled(fleet))
    fleet.start(plan.specs)
    place = ServerAddress(plan.host, plan.port, plan.token, plan.https)
    announcing = asyncio.create_task(announce(place, fleet.pids, _print_line))
    try:
        await asyncio.wait({stop, fleet.failed}, return_when=asyncio.FIRST_COMPLETED)
        failure = fleet.failed.result() if fleet.failed.done() else None
        announcing.cancel()
        stop_listening()
        await _shut_down(fleet, failure)
        return failure.exit_code if failure else (FORCED if fleet.killed else 0)
    finally:
        fleet.kill()
        for task in (stop, announcing):
            task.cancel()
        await asyncio.gather(stop, announcing, return_exceptions=True)


async def _shut_down(fleet: Fleet, failure: Failure | None) -> None:
    grace_s = FAILURE_GRACE_S if failure else GRACE_S
    _print_line("antiphon", f"stopping: {failure.message}" if failure else "stopping (Ctrl-C again: at once)")
    await fleet.stop(("gateway",), grace_s)
    await fleet.stop(BACK_SERVICES, grace_s)
    await fleet.stop(("nats",), BUS_GRACE_S)
    _print_line("antiphon", f"stopped: {failure.message}" if failure else "stopped")


async def _signalled(fleet: Fleet) -> None:
    """Returns at the first signal to stop; at the next one the children are killed."""
    first = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if first.is_set():
            fleet.kill()
        first.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    await first.wait()


def _print_line(name: str, line: str) -> None:
    # Whoever read the output may have gone; the servers must not stop for that.
    with contextlib.suppress(OSError):
        print(f"{name:<13} | {line}", file=sys.stderr, flush=True)
