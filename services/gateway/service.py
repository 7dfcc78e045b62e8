"""The gateway as a service process: the gateway's actor on the bus, and the HTTP server (uvicorn)."""

import asyncio
import socket

from services.gateway.app import continue_batches, create_app
from services.gateway.edge.access.key_file import KeyFile
from services.gateway.edge.access.log_part import GatewayLogs
from services.gateway.edge.access.quotas import Quotas
from services.gateway.edge.access.usage import Receiver, UsageLedger
from services.gateway.edge.access.usage_sinks import BusSink, sink_of
from services.gateway.edge.http.auth import ApiKeys
from services.gateway.edge.http.server.uvicorn_server import Server, listen, server_config
from services.gateway.guests import make_guests
from services.gateway.guests.images.kept import KeptPictures
from services.gateway.guests.responses.conversations.log_store import LogConversationStore
from services.gateway.guests.responses.stored.log_store import LogResponseStore
from services.gateway.guests.responses.stored.recorded import RecordedResponses
from services.gateway.guests.resume.background.requests import BackgroundStreams
from services.gateway.guests.resume.background.store import BackgroundStore
from services.gateway.guests.resume.store import StreamStore
from services.gateway.guests.resume.streams import Streams
from services.gateway.guests.resume.taken import TakenStreams
from services.gateway.ops.timeline import Recorder
from services.gateway.ops.timeline.guest import Timeline
from services.gateway.path.actor import GatewayActor
from services.gateway.path.models.catalog import RETRY_AFTER_S
from shared import limits
from shared.actors.host import Host
from shared.bus.durable_log import Storage
from shared.config import GatewaySettings
from shared.deployment import stores
from shared.errors import ServiceError
from shared.messages import GatewayStatus, Heartbeat, ServiceName
from shared.security import tls
from shared.settings.records import check_records


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
        self._unattended: BackgroundStreams | None = None
        self._sink = sink_of(settings.usage_sink) if settings.usage_sink else None

    async def start(self, host: Host) -> None:
        """See Service."""
        required = [name for name in self._settings.required_engines.split(",") if name]
        recorder = Recorder(self._settings.record_requests, content_bytes=self._settings.record_content_mb << 20)
        self._actor = GatewayActor(
            host,
            self._settings.default_model,
            required,
            self._settings.max_queue_wait,
        )
        timeline, taken = Timeline(self._actor, recorder), TakenStreams()
        guests = make_guests(self._actor, self._settings)
        self._actor.add_guests([timeline, taken, *guests])
        listener = listen(self._settings)
        await self._actor.listen()
        self._actor_task = asyncio.create_task(self._actor.run())
        self._background = [asyncio.create_task(self._actor.watch())]
        if self._key_file is not None:
            self._background.append(asyncio.create_task(self._key_file.watch(self._keys.replace)))
        self._usage = self._make_ledger(host)
        logs = GatewayLogs(host, _storage(self._settings), lambda: len(self._living()))
        kept_pictures = KeptPictures(logs)
        records = StreamStore(logs, kept_pictures)
        self._streams = self._make_streams(host, records)
        if self._streams is not None:
            taken.receivers.append(self._streams.on_taken)
            self._background.append(asyncio.create_task(self._streams.journal.run()))
            background = BackgroundStore(logs, kept_pictures)
            self._unattended = BackgroundStreams(host, background, records, self._streams.journal, self._living)
            taken.receivers.append(self._unattended.on_taken)
        self._app = create_app(
            self._actor.backend,
            self._settings,
            keys=self._keys,
            quotas=_make_quotas(host),
            usage=self._usage,
            heartbeats=self._actor.engines,
            records=timeline.records,
            members=self._actor.topology,
            engine_controls=self._actor.engine_controls,
            streams=self._streams,
            finished_responses=None if self._streams is None else LogResponseStore(host, kept_pictures),
            background=self._unattended,
            conversations=None if self._streams is None else LogConversationStore(host, kept_pictures),
            guests=guests,
            versions=self._actor.versions,
            comparisons=self._actor.guests.version_facts,
        )
        self._server = Server(server_config(self._app, self._settings))
        self._server_task = asyncio.create_task(self._serve(self._actor, listener))

    def status(self) -> GatewayStatus:
        """See Service."""
        assert self._actor is not None
        return self._actor.backend.status()

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
                await responses.leave()
            await self._server.leave()
            # The actor begins to refuse requests only when no connection can send one; then only batches can.
            await self._server_task
            await self._actor.backend.drain()
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
        actor.backend.fail_all(ServiceError("draining", "The server is shutting down.", retry_after_s=RETRY_AFTER_S))

    def _make_streams(self, host: Host, store: StreamStore) -> Streams | None:
        settings = self._settings
        if settings.stream_store == "off":
            return None
        records_all = settings.record_streams == "all"
        return Streams(host, store, settings.stream_grace, records_all=records_all, heard=self._heard)

    def _heard(self) -> set[tuple[str, str]]:
        return {(beat.id, beat.instance_id) for beat in self._gateways()}

    def _living(self) -> set[tuple[str, str]]:
        # A draining gateway has handed its background responses over to the others.
        return {(beat.id, beat.instance_id) for beat in self._gateways() if beat.state != "draining"}

    def _gateways(self) -> list[Heartbeat]:
        assert self._actor is not None
        return [beat for beat, _ in self._actor.topology() if beat.service == "gateway"]

    def _recorded_responses(self) -> RecordedResponses | None:
        return self._app.state.responses

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


def _storage(settings: GatewaySettings) -> Storage:
    return "file" if settings.stream_store == "file" else "memory"


def _make_quotas(host: Host) -> Quotas:
    store = host.transport.key_value_store(stores.quotas(host.subjects), timeout_s=limits.QUOTA_STORE_TIMEOUT_S)
    return Quotas(clock=host.clock, gateway=f"{host.id}.{host.instance_id}", store=store)
