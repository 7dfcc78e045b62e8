"""The gateway as a service process: the gateway's actor on the bus, and the HTTP server (uvicorn)."""

import asyncio
import socket

from services.gateway.access.key_file import KeyFile
from services.gateway.access.quotas import Quotas
from services.gateway.access.usage import Receiver, UsageLedger
from services.gateway.access.usage_sinks import BusSink, sink_of
from services.gateway.actor import GatewayActor
from services.gateway.app import continue_batches, create_app
from services.gateway.http.auth import ApiKeys
from services.gateway.http.server.uvicorn_server import Server, listen, others, server_config
from services.gateway.model_catalog import RETRY_AFTER_S
from services.gateway.pictures.remote import RemotePictures
from services.gateway.record import Recorder
from services.gateway.requests.lockstep.metrics import LockstepCollector
from services.gateway.responses.stored.log_store import LogResponseStore
from services.gateway.responses.stored.recorded import RecordedResponses
from services.gateway.streams.background.requests import BackgroundStreams
from services.gateway.streams.background.store import BackgroundStore
from services.gateway.streams.store import StreamStore
from services.gateway.streams.streams import Streams
from shared import limits
from shared.actors.host import Host
from shared.bus.durable_log import Storage
from shared.config import GatewaySettings
from shared.errors import ServiceError
from shared.messages import GatewayStatus, ServiceName, StreamTaken
from shared.security import tls
from shared.settings.records import check_records
from shared.subjects import bucket_name


class GatewayService:
    """One gateway. Raises SettingsError if the settings, the files for HTTPS or the file of API keys cannot be used."""

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
        listener = listen(self._settings)
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
        self._server = Server(server_config(self._app, self._settings), others(self._settings))
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
        rest = asyncio.create_task(self._end_the_rest(self._actor))
        try:
            if self._streams is not None:
                self._streams.leave()
            if (responses := self._recorded_responses()) is not None:
                responses.leave()
            await self._server.leave()
            # The actor begins to refuse requests only when no connection can send one; then only batches can.
            await self._server_task
            await self._actor.drain()
            await self._usage.close()
            if self._streams is not None:
                await self._streams.journal.close()
        finally:
            rest.cancel()
            await self._actor.stop()
            await self._actor_task
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)

    async def _end_the_rest(self, actor: GatewayActor) -> None:
        """Ends the requests that take longer than the drain may take, while the bus still answers."""
        await asyncio.sleep(limits.HAND_OVER_S)
        if self._streams is not None:
            self._streams.hand_over()
        # The clients of other streams get the error as the last event.
        actor.fail_all(ServiceError("draining", "The server is shutting down.", retry_after_s=RETRY_AFTER_S))

    def _make_unattended(self, host: Host, actor: GatewayActor) -> BackgroundStreams | None:
        """Returns the manager of background requests; None if there is no store for them."""
        if self._streams is None:
            return None

        def living() -> set[tuple[str, str]]:
            # A draining gateway has handed its background responses over to the others.
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
        # Connections wait in the listening socket meanwhile. Otherwise a client that connects during the start would
        # get an error about a missing service, although only that service's first heartbeat has not arrived yet.
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


def _make_quotas(host: Host) -> Quotas:
    store = host.transport.key_value_store(
        bucket_name(host.subjects.namespace, "limits"),
        ttl_s=limits.QUOTA_ENTRY_S,
        timeout_s=limits.QUOTA_STORE_TIMEOUT_S,
    )
    return Quotas(host.clock, f"{host.id}.{host.instance_id}", store)
