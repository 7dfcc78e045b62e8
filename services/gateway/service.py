"""The gateway as a service process: the gateway's actor on the bus, and the HTTP server (uvicorn)."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from services.gateway.access.key_file import KeyFile
from services.gateway.access.quotas import Quotas
from services.gateway.access.usage import Receiver, UsageLedger
from services.gateway.access.usage_sinks import BusSink, sink_of
from services.gateway.actor import GatewayActor
from services.gateway.app import continue_batches, create_app
from services.gateway.http.auth import ApiKeys
from services.gateway.http.connection import BoundedConnection
from services.gateway.pictures.remote import RemotePictures
from services.gateway.record import Recorder
from services.gateway.requests.lockstep.metrics import LockstepCollector
from services.gateway.responses.log_store import LogResponseStore
from services.gateway.responses.recorded import RecordedResponses
from services.gateway.streams.background import BackgroundStreams
from services.gateway.streams.background_store import BackgroundStore
from services.gateway.streams.store import StreamStore
from services.gateway.streams.streams import Streams
from shared import limits
from shared.actors.durable_log import Storage
from shared.actors.host import Host
from shared.config import GatewaySettings, SettingsError
from shared.messages import GatewayStatus, ServiceName, StreamTaken
from shared.security import tls
from shared.settings.records import check_records
from shared.subjects import bucket_name

BACKLOG = 2048
TICKS_A_SECOND = 10
"""Ticks per second of uvicorn's main loop. uvicorn counts ticks and updates the date header at each multiple of 10."""


class GatewayService:
    """One gateway. Raises SettingsError if the files for HTTPS or of API keys or the settings cannot be used."""

    name: ServiceName = "gateway"

    def __init__(self, settings: GatewaySettings) -> None:
        tls.check(settings)
        check_records(settings)
        self._settings = settings
        self._actor: GatewayActor | None = None
        self._key_file = KeyFile(settings.api_keys_file) if settings.api_keys_file else None
        self._keys = ApiKeys(
            settings.api_keys, self._key_file.read() if self._key_file else None, settings.launcher_key
        )
        self._sink = sink_of(settings.usage_sink) if settings.usage_sink else None

    async def start(self, host: Host) -> None:
        """See Service."""
        required = [name for name in self._settings.required_engines.split(",") if name]
        recorder = Recorder(self._settings.record_requests, content_bytes=self._settings.record_content_mb << 20)
        pictures = RemotePictures(self._settings.allowed_media_domains)
        self._actor = GatewayActor(
            host,
            self._settings.default_model,
            required,
            recorder,
            pictures,
            self._settings.lockstep,
            self._settings.max_queue_wait,
        )
        listener = _listen(self._settings)
        await self._actor.listen()
        self._actor_task = asyncio.create_task(self._actor.run())
        self._background = [asyncio.create_task(self._actor.watch())]
        if self._key_file is not None:
            self._background.append(asyncio.create_task(self._key_file.watch(self._keys.replace)))
        self._usage = self._make_ledger(host)
        self._streams = _make_streams(host, self._settings)
        if self._streams is not None:
            self._actor.on_stream_taken = self._on_taken
            self._background.append(asyncio.create_task(self._streams.journal.run()))
        self._unattended = self._make_unattended(host, self._actor)
        self._app = create_app(
            self._actor,
            self._settings,
            keys=self._keys,
            quotas=_make_quotas(host),
            usage=self._usage,
            heartbeats=self._actor.engines,
            records=self._actor.records,
            members=self._actor.topology,
            engine_controls=self._actor.engine_controls,
            streams=self._streams,
            finished_responses=None if self._streams is None else LogResponseStore(host, _storage(self._settings)),
            background=self._unattended,
            collectors=[LockstepCollector(self._actor.lockstep, self._actor.engines)],
            versions=self._actor.versions,
            comparisons=self._actor.shadow.comparisons,
        )
        self._server = _Server(server_config(self._app, self._settings))
        self._server_task = asyncio.create_task(self._serve(self._actor, listener))

    def status(self) -> GatewayStatus:
        """See Service."""
        assert self._actor is not None
        return self._actor.status()

    async def run(self) -> None:
        """See Service."""
        tasks = {self._actor_task, self._server_task, *self._background}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task

    async def drain(self) -> None:
        """See Service. Requests on connections that were accepted are answered; idle connections are closed."""
        assert self._actor is not None
        try:
            if self._streams is not None:
                self._streams.leave()
            if (responses := self._recorded_responses()) is not None:
                responses.leave()
            await self._server.leave()
            # The actor refuses requests only when no connection can bring one: those of batches.
            await self._server_task
            await self._actor.drain()
            await self._usage.close()
            if self._streams is not None:
                await self._streams.journal.close()
        finally:
            await self._actor.stop()
            await self._actor_task
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)

    def _make_unattended(self, host: Host, actor: GatewayActor) -> BackgroundStreams | None:
        """Returns the requests that run without clients; None if there is no store for them."""
        if self._streams is None:
            return None

        def living() -> set[tuple[str, str]]:
            # One that is draining has left its background responses to the others.
            beats = [beat for beat, _ in actor.topology() if beat.service == "gateway" and beat.state != "draining"]
            return {(beat.id, beat.instance_id) for beat in beats}

        storage = _storage(self._settings)
        return BackgroundStreams(
            host, BackgroundStore(host, storage), StreamStore(host, storage), self._streams.journal, living
        )

    def _recorded_responses(self) -> RecordedResponses | None:
        return self._app.state.responses

    def _on_taken(self, message: StreamTaken) -> None:
        for streams in (self._streams, self._unattended):
            if streams is not None:
                streams.on_taken(message)

    def _make_ledger(self, host: Host) -> UsageLedger:
        receivers = [Receiver("bus", BusSink(host.transport, host.subjects.usage()).deliver)]
        if self._sink is not None:
            receivers.append(Receiver("sink", self._sink.deliver))
        return UsageLedger(host.id, receivers)

    async def _serve(self, actor: GatewayActor, listener: socket.socket) -> None:
        # Connections wait in the listening socket meanwhile. Otherwise a client that connects at the gateway's start
        # would be told that a service is missing, when only its heartbeat has not arrived yet.
        await actor.first_heartbeats()
        await continue_batches(self._app)
        if (responses := self._recorded_responses()) is not None:
            self._background.append(asyncio.create_task(responses.watch()))
        await self._server.serve(sockets=[listener])


def _make_streams(host: Host, settings: GatewaySettings) -> Streams | None:
    if settings.stream_store == "off":
        return None
    records_all = settings.record_streams == "all"
    return Streams(host, StreamStore(host, _storage(settings)), settings.stream_grace, records_all=records_all)


def _storage(settings: GatewaySettings) -> Storage:
    return "file" if settings.stream_store == "file" else "memory"


class _Server(uvicorn.Server):
    """uvicorn without signal handling, which `shared.actors.service` does, and without waking up ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leave = asyncio.Event()

    async def leave(self) -> None:
        """Makes the server accept no more connections and end when the requests in progress are answered.

        Connections that were accepted just before get `ACCEPT_LINGER_S` to bring their first request.
        """
        for server in getattr(self, "servers", ()):
            server.close()
        await asyncio.sleep(limits.ACCEPT_LINGER_S)
        self.should_exit = True
        self._leave.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Like uvicorn's main loop, but with one tick per second.

        A tick sets the date header of the next responses and returns whether the server must end.
        """
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += TICKS_A_SECOND
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._leave.wait()


def _make_quotas(host: Host) -> Quotas:
    store = host.transport.key_value_store(
        bucket_name(host.subjects.namespace, "limits"),
        ttl_s=limits.QUOTA_ENTRY_S,
        timeout_s=limits.QUOTA_STORE_TIMEOUT_S,
    )
    return Quotas(host.clock, f"{host.id}.{host.instance_id}", store)


def server_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """Returns the configuration of the HTTP server. The process itself provides signals, logging and the socket."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=BoundedConnection,
        ws="none",
        timeout_graceful_shutdown=int(limits.DRAIN_S),
        timeout_keep_alive=int(limits.IDLE_CONNECTION_S),
        server_header=False,
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
    )


def _listen(settings: GatewaySettings) -> socket.socket:
    """Returns a listening socket. Several gateways may share a port: the kernel distributes connections over them."""
    if settings.listen_fd >= 0:
        return socket.socket(fileno=settings.listen_fd)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # The kernel closes the connection of a client that accepts no data; accepted sockets inherit the option.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limits.CLIENT_STALL_S))
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise SettingsError(f"--port: cannot listen on {settings.host}:{settings.port} ({error.strerror}).") from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
