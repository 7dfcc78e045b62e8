"""The process that runs a service: settings, logging, bus connection, heartbeats, signals, drain, exit code.

A service's `__main__` calls only `main`; `run_service` is the asyncio part of `main`. The service itself implements
`host.Service`.

| exit code | meaning                                               | what a supervisor should do  |
|-----------|-------------------------------------------------------|------------------------------|
| 0         | drained                                               | nothing                      |
| 13        | the service cannot continue                           | start it again               |
| 78        | a setting is invalid or cannot be fulfilled           | nothing: it would fail again |
| 128 + n   | a second signal n came while draining                 | nothing                      |
"""

import argparse
import asyncio
import dataclasses
import gc
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from antiphon.shared import limits
from antiphon.shared.actors.descriptors import raise_limit
from antiphon.shared.actors.discovery import Discovery, Endpoint, Identity
from antiphon.shared.actors.host import Host, Service, Status
from antiphon.shared.actors.presence import HeartbeatTask, HeartbeatThread, first_of, interval_of
from antiphon.shared.bus.credentials import server_urls
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.transport import Transport
from antiphon.shared.clock import SystemClock
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError, add_flags, normalise, parse
from antiphon.shared.observability import resources, telemetry
from antiphon.shared.observability.logs import configure_logging
from antiphon.shared.security import tls
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.settings.other_options import take
from antiphon.shared.subjects import TOKENIZER_QUEUE, VISION_QUEUE, Subjects, check_id, new_instance_id
from antiphon.shared.version import __version__

log = logging.getLogger(__name__)
S = TypeVar("S", bound=BusSettings)

EXIT_OK = 0
EXIT_FAULT = 13
EXIT_CONFIG = 78
EXIT_SIGNAL = 128
GC_THRESHOLD = 10_000
"""Number of new container objects after which the youngest generation is collected. Most objects live for one message
or one request and are freed without the collector; with Python's default of 700, it takes a tenth of a gateway's time.
"""
PROBE_S = 5.0
"""Time limit for the start-up probe, a message that the process sends to itself through the bus, seconds."""
RUN_END_S = 2.0
"""Time limit for a service's `run` to return after `drain` or after its cancellation, seconds."""


# --- the process ------------------------------------------------------------------------------------------------------


def main(
    name: str,
    settings_type: type[S],
    build: Callable[[S], Service],
    argv: Sequence[str] | None = None,
    *,
    heartbeat_thread: bool = False,
) -> int:
    """Runs the service `name` in this process. Returns exit code 0 or 78; with any other code it ends the process.

    `build` makes the service from its settings. It may raise SettingsError or ServiceError for wrong settings.
    """
    taken = take(normalise(sys.argv[1:] if argv is None else argv), os.environ)
    try:
        settings = _settings(settings_type, name, taken.words)
        notices = taken.notices()
    except SettingsError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return EXIT_CONFIG
    configure_logging(settings.log_level, settings.service_id, settings.log_format, queued=True)
    raise_limit()
    for notice in notices:
        log.info("%s", notice)
    telemetry.setup(f"antiphon-{name}", settings.service_id, endpoint=settings.otlp_traces_endpoint)
    with asyncio.Runner() as runner:
        code = runner.run(_build_and_run(settings, build, heartbeat_thread))
        telemetry.shutdown()
        if code not in (EXIT_OK, EXIT_CONFIG):
            end_process(code)
    return code


async def run_service(settings: BusSettings, service: Service, *, heartbeat_thread: bool = False) -> int:
    """Runs a service on this event loop until a signal arrives or the service ends. Returns the exit code.

    `heartbeat_thread`: send heartbeats from a separate thread, for services that block the event loop for long.
    """
    process = _Process(settings, service, heartbeat_thread)
    signals = _Signals()
    signals.install()
    try:
        if not await _unless(signals.first, process.start()):
            log.info("stopped before it was ready")
            return EXIT_OK
        await process.work(signals.first)
        drained = await process.drain(signals.second)
        return EXIT_OK if drained else EXIT_SIGNAL + signals.number
    except _Unusable as unusable:
        log.error("%s", unusable)
        return EXIT_CONFIG
    except ServiceError as error:
        log.critical("%s", error)
        return EXIT_FAULT
    except Exception:  # any unexpected error must end the process with the exit code for faults
        log.critical("%s cannot go on", service.name, exc_info=True)
        return EXIT_FAULT
    finally:
        await process.close()
        signals.remove()


def default_id(service: str) -> str:
    """Returns `<service>-<host name>-<process id>`, with characters that are not allowed in subjects replaced."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40]
    return f"{service}-{host}-{os.getpid()}"


class _Unusable(Exception):
    """Raised if the settings, or a model or file that they name, cannot be used."""


class _Process:
    """One run of one service."""

    def __init__(self, settings: BusSettings, service: Service, heartbeat_thread: bool) -> None:
        self._settings = settings
        self._service = service
        self._heartbeat_thread = heartbeat_thread
        self._transport: NatsTransport | None = None
        self._heartbeats: HeartbeatTask | HeartbeatThread | None = None
        self._discovery: Discovery | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects to the bus, starts the service, checks with a probe that the bus delivers, and starts heartbeats."""
        try:
            member_id = _member_id(self._settings, self._service.name)
            subjects = _subjects(self._settings.namespace)
            transport = self._transport = await self._connect(subjects, member_id, member_id)
            host = Host(
                transport=transport,
                subjects=subjects,
                clock=SystemClock(),
                id=member_id,
                instance_id=new_instance_id(),
                resources=resources.read,
            )
            await self._service.start(host)
        except SettingsError as error:
            raise _Unusable(str(error)) from error
        except ServiceError as error:
            if error.status < 500:
                raise _Unusable(str(error)) from error
            raise
        self._running = asyncio.create_task(self._service.run(), name=f"{self._service.name} service")
        await transport.barrier()
        await _probe(transport, subjects.inbox(self._service.name, member_id))
        gc.collect()
        gc.freeze()  # objects made at start-up live as long as the process: garbage collections can skip them
        gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
        await self._announce(host, transport)
        log.info("ready")

    async def work(self, stop: asyncio.Event) -> None:
        """Returns when `stop` is set or the service has ended. Raises if the service fails or the bus is lost."""
        assert self._running is not None
        assert self._transport is not None
        assert self._heartbeats is not None
        waits = (stop.wait(), _ended(self._running), self._transport.lost(), self._heartbeats.failed())
        await first_of(*waits)
        if not stop.is_set() and not self._running.done():
            raise ServiceError("bus_unavailable", "The connection to the message bus has ended for good.")

    async def drain(self, force: asyncio.Event) -> bool:
        """Drains the service. Returns False if `force` was set before the drain ended. Raises the service's errors."""
        assert self._heartbeats is not None
        assert self._running is not None
        log.info("draining")
        await self._heartbeats.announce("draining")
        if not await _unless(force, self._drain_service()):
            log.warning("drain was cut short")
            return False
        if not await _unless(force, _ended(self._running, RUN_END_S)):
            return False
        if not self._running.done():
            log.warning("the service still runs after its drain")
        log.info("drained")
        return True

    async def close(self) -> None:
        """Ends all tasks and closes the bus connection. May be called in any state."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running}, timeout=RUN_END_S)
        if self._discovery is not None:
            await self._discovery.stop()
        if self._heartbeats is not None:
            await self._heartbeats.stop()
        if self._transport is not None:
            await self._transport.close()

    async def _drain_service(self) -> None:
        try:
            async with asyncio.timeout(limits.DRAIN_S):
                await self._service.drain()
        except TimeoutError:
            log.warning("the service did not drain within %g s", limits.DRAIN_S)

    async def _connect(self, subjects: Subjects, member_id: str, name: str) -> NatsTransport:
        urls = server_urls(self._settings.nats)
        if not urls:
            raise SettingsError("nats: the URL of a NATS server is needed (--nats or ANTIPHON_NATS)")
        credentials, inbox = self._settings.nats_credentials, subjects.inbox(self._service.name, member_id)
        context = tls.bus_context(self._settings)
        return await NatsTransport.connect(
            urls,
            name=name,
            inbox_prefix=inbox,
            credentials=credentials,
            tls=context,
        )

    async def _announce(self, host: Host, transport: NatsTransport) -> None:
        name, subjects = self._service.name, host.subjects
        interval_s = interval_of(name)
        if self._heartbeat_thread:
            connect = lambda: self._connect(subjects, host.id, f"{host.id} heartbeats")  # noqa: E731 - for the thread
            self._heartbeats = HeartbeatThread(host, self._service, connect, interval_s=interval_s)
        else:
            self._heartbeats = HeartbeatTask(host, self._service, interval_s=interval_s)
        await self._heartbeats.start("ready")
        self._discovery = Discovery(
            transport,
            _identity(name, host, self._settings.namespace, getattr(self._service.status(), "model", "")),
            deliveries=transport.deliveries.__getitem__,
            load=lambda: _load(self._service.status()),
        )
        await self._discovery.start()


class _Signals:
    """Handles SIGTERM and SIGINT: the first signal starts the drain, the second one ends the process without it."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number = 0

    def install(self) -> None:
        """Installs the signal handlers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._came, number)

    def remove(self) -> None:
        """Removes the signal handlers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _came(self, number: int) -> None:
        self.number = number
        (self.second if self.first.is_set() else self.first).set()


# --- helpers ----------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises SettingsError, so that a wrong flag has the same exit code as a wrong setting."""
        raise SettingsError(message)


def _settings(settings_type: type[S], name: str, argv: Sequence[str]) -> S:
    parser = _Parser(prog=f"python -m antiphon.services.{name}", allow_abbrev=False)
    add_flags(parser, settings_type)
    settings = parse(settings_type, parser.parse_args(argv))
    return dataclasses.replace(settings, service_id=_member_id(settings, name))


def _member_id(settings: BusSettings, service: str) -> str:
    try:
        return check_id(settings.service_id or default_id(service))
    except ValueError as error:
        raise SettingsError(f"service-id: {error}") from error


async def _build_and_run(settings: S, build: Callable[[S], Service], heartbeat_thread: bool) -> int:
    try:
        service = build(settings)
    except (SettingsError, ServiceError) as error:
        log.error("%s", error)
        return EXIT_CONFIG
    return await run_service(settings, service, heartbeat_thread=heartbeat_thread)


def end_process(code: int) -> NoReturn:
    """Ends this process at once, from any thread. Does not wait for other threads.

    A normal exit of the interpreter waits for all threads, so a thread that hangs in a step would keep the process
    alive.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work`, and cancels it if `event` is set before it ends.

    Returns whether `work` ended; raises its exception.
    """
    task = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.wait([task, waiting])


async def _ended(task: asyncio.Task[None], timeout_s: float | None = None) -> None:
    """Waits until a task ends or the time is up, without cancelling the task. Raises the task's exception."""
    await asyncio.wait({task}, timeout=timeout_s)
    if task.done() and not task.cancelled():
        task.result()


async def _probe(transport: Transport, inbox: str) -> None:
    """Sends a message to this process through the bus. Raises ServiceError if it does not arrive within `PROBE_S`."""
    subject = f"{inbox}.probe"
    came = asyncio.Event()
    subscription = await transport.subscribe(subject, lambda delivery: came.set())
    try:
        await transport.barrier()
        await transport.publish(subject, b"")
        async with asyncio.timeout(PROBE_S):
            await came.wait()
    except TimeoutError:
        message = (
            f"A message to {subject} did not come back through the bus: may this user publish and subscribe to it?"
        )
        raise ServiceError("bus_unavailable", message) from None
    finally:
        await subscription.unsubscribe()


def _subjects(namespace: str) -> Subjects:
    try:
        check_id(namespace)
    except ValueError:
        raise SettingsError(f"namespace: 1 to 64 letters, digits, '-' or '_', not {namespace!r}") from None
    return Subjects(namespace)


def _identity(service: str, host: Host, namespace: str, model: str) -> Identity:
    metadata = {
        "instance_id": host.instance_id,
        "namespace": namespace,
        "protocol": str(limits.PROTOCOL_VERSION),
        "model": model,
    }
    endpoints = _endpoints(service, host, model)
    return Identity(
        name=f"{namespace}-{service}",
        id=host.id,
        version=__version__,
        description=f"Antiphon {service}",
        metadata=metadata,
        endpoints=endpoints,
    )


def _endpoints(service: str, host: Host, model: str) -> Sequence[Endpoint]:
    subjects, place = host.subjects, (host.id, host.instance_id)
    known = {
        "gateway": [
            Endpoint("text", subjects.gateway_text(*place)),
            Endpoint("control", subjects.gateway_control(*place)),
        ],
        "tokenizer": [Endpoint("tokenize", subjects.tokenize(model), TOKENIZER_QUEUE)],
        "vision": [Endpoint("encode", subjects.vision(model), VISION_QUEUE)],
        "engine": [Endpoint("control", subjects.engine_control(*place))],
        "detokenizer": [
            Endpoint("control", subjects.detokenizer_control(*place)),
            Endpoint("tokens", subjects.detokenizer_tokens(*place)),
        ],
    }
    return known[service]


def _load(status: Status) -> dict[str, Any]:
    return {k: v for k, v in msgspec.structs.asdict(status).items() if isinstance(v, int | float | str)}
