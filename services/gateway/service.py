"""The gateway as a service process: the gateway's actor on the bus, and the HTTP server (uvicorn)."""

import asyncio
import socket

import msgspec

from antiphon.services.gateway.app import create_app
from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.edge.access.key_file import KeyFile
from antiphon.services.gateway.edge.access.log_part import GatewayLogs
from antiphon.services.gateway.edge.access.quotas import Quotas
from antiphon.services.gateway.edge.access.usage import Receiver, UsageBook, UsageLedger
from antiphon.services.gateway.edge.access.usage_sinks import BusSink, sink_of
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.edge.http.server.uvicorn_server import Server, listen, others, server_config
from antiphon.services.gateway.guests import make_guests
from antiphon.services.gateway.ops.history.guest import History
from antiphon.services.gateway.ops.timeline.guest import Timeline
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.guest import Lifetime
from antiphon.services.gateway.path.models.catalog import RETRY_AFTER_S
from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.config import GatewaySettings
from antiphon.shared.deployment import stores
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import GatewayStatus, ServiceName
from antiphon.shared.security import tls
from antiphon.shared.settings.records import check_records


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
        self._actor = GatewayActor(
            host,
            self._settings.default_model,
            required,
            self._settings.max_queue_wait,
        )
        timeline = Timeline(self._actor, recorder)
        history = History(host.clock, self._actor.topology, self._actor.changes)
        self._actor.add_guests([timeline, history])
        if self._settings.stream_store != "off":
            storage = "file" if self._settings.stream_store == "file" else "memory"
            self._actor.guests.offer(KeptImages(GatewayLogs(host, storage, self._num_living)))
        make_guests(self._actor, self._settings)
        listener = listen(self._settings)
        await self._actor.listen()
        self._actor_task = asyncio.create_task(self._actor.run())
        self._background = [asyncio.create_task(self._actor.watch())]
        if self._key_file is not None:
            self._background.append(asyncio.create_task(self._key_file.watch(self._keys.replace)))
        self._usage = self._make_ledger(host)
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
            guests=self._actor.guests,
            versions=self._actor.versions,
            history=history,
            changes=self._actor.changes,
            gateway=host.id,
        )
        self._parts: list[Lifetime] = [*self._actor.guests, *self._app.state.apis]
        self._background += [asyncio.create_task(work) for part in self._parts for work in part.work()]
        self._server = Server(server_config(self._app, self._settings), others(self._settings))
        self._server_task = asyncio.create_task(self._serve(self._actor, listener))

    def status(self) -> GatewayStatus:
        """See Service."""
        assert self._actor is not None
        return msgspec.structs.replace(self._actor.backend.status(), errors=self._app.state.metrics.num_errors)

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
            for part in self._parts:
                await part.leave()
            await self._server.leave()
            # The actor begins to refuse requests only when no connection can send one; then only batches can.
            await self._server_task
            await self._actor.backend.drain()
            await self._usage.close()
            for part in self._parts:
                await part.finish()
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
        for part in self._parts:
            part.hand_over()
        # The clients of other streams get the error as the last event.
        actor.backend.fail_all(ServiceError("draining", "The server is shutting down.", retry_after_s=RETRY_AFTER_S))

    def _num_living(self) -> int:
        assert self._actor is not None
        return sum(beat.state != "draining" for beat in self._actor.gateways())

    def _make_ledger(self, host: Host) -> UsageLedger:
        receivers = [Receiver("bus", BusSink(host.transport, host.subjects.usage_record).deliver)]
        if self._sink is not None:
            receivers.append(Receiver("sink", self._sink.deliver))
        assert self._actor is not None
        return UsageLedger(host.id, receivers, self._actor.guests.offered(UsageBook))

    async def _serve(self, actor: GatewayActor, listener: socket.socket) -> None:
        # Connections wait in the listening socket meanwhile. Otherwise a client that connects during the start would
        # get an error about a missing service, although only that service's first heartbeat has not arrived yet.
        await actor.first_heartbeats()
        for part in self._parts:
            await part.answering()
        await self._server.serve(sockets=[listener])


def _make_quotas(host: Host) -> Quotas:
    store = host.transport.key_value_store(stores.quotas(host.subjects), timeout_s=limits.QUOTA_STORE_TIMEOUT_S)
    return Quotas(clock=host.clock, gateway=f"{host.id}.{host.instance_id}", store=store)
