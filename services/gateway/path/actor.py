"""The gateway's actor: receives all messages for the gateway, and starts requests for the HTTP edge.

The actor has the table of requests, passes each text event to its request, tracks the members (running service
processes) by their heartbeats, and asks engines about sequences without progress. A request actor handles a single
request; `dispatcher` assigns sequences to engines.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from antiphon.services.gateway.path.backend import GatewayBackend
from antiphon.services.gateway.path.gateway_parts import GatewayParts
from antiphon.services.gateway.path.guest import Guest, Guests
from antiphon.services.gateway.path.liveness.bus_wait import BusWait
from antiphon.services.gateway.path.liveness.changes import MemberChanges
from antiphon.services.gateway.path.liveness.death_probe import DeathProbe
from antiphon.services.gateway.path.liveness.loss_report import RESTARTED, silent
from antiphon.services.gateway.path.liveness.progress_watch import ProgressWatch
from antiphon.services.gateway.path.liveness.pulse import WATCH_S, Pulse
from antiphon.services.gateway.path.losses import Losses, has_sequences
from antiphon.services.gateway.path.models.catalog import SERVICES, VISION, ModelCatalog
from antiphon.services.gateway.path.models.versions import VersionDirectory
from antiphon.services.gateway.path.placement.dispatcher import Dispatcher
from antiphon.services.gateway.path.placement.engine_controls import EngineControls
from antiphon.services.gateway.path.placement.moves import Moves
from antiphon.services.gateway.path.router import Router
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.services.gateway.path.service_clients import ServiceClients
from antiphon.shared import limits
from antiphon.shared.actors.actor import Actor, Envelope, handles
from antiphon.shared.actors.heard import heard_on
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    Heartbeat,
    ModelsChanged,
    OwnershipQuery,
    ProgressReply,
    RecordListQuery,
    RecordQuery,
    SelfTestReply,
    SequenceRef,
    StreamTaken,
    TextEvents,
    TokenEvents,
)

log = logging.getLogger(__name__)


class GatewayActor(Actor):
    """One gateway on the bus. `backend` has its requests, and is what the HTTP edge calls."""

    def __init__(
        self,
        host: Host,
        default_model: str = "",
        required_engines: Sequence[str] = (),
        max_queue_wait: float = 0.0,
    ) -> None:
        """`max_queue_wait`: requests are refused if their expected wait is longer, seconds; 0: never.

        `add_guests` is called before `listen`.
        """
        super().__init__(f"gateway {host.id}", host.transport)
        self.members = Members()
        self._gateways = Members()
        """The gateways, this one included; only for the topology."""
        self.unknown_events = 0
        self.host = host
        self.guests = Guests()
        router, self._clients = Router(), ServiceClients(host, self.members)
        self.parts = GatewayParts(
            host=host,
            members=self.members,
            router=router,
            clients=self._clients,
            dispatcher=Dispatcher(host, self.members, router, self._clients, self.guests),
            watch=ProgressWatch(),
            moves=Moves(),
            guests=self.guests,
            bus=BusWait(host),
        )
        self.engine_controls = EngineControls(host, self.members, self.parts.moves)
        self.versions = VersionDirectory(host)
        self._pulse = Pulse(host.clock, host.transport)
        judged_at = self._pulse.judging_time
        self.catalog = ModelCatalog(
            self.members, host.clock, default_model, judged_at, required_engines, self.versions, self.guests
        )
        self.backend = GatewayBackend(self.parts, self.catalog, max_queue_wait)
        self.changes = MemberChanges(host.clock)
        self.losses = Losses(self.parts, self.backend.requests, self.changes, self.gateways)
        self._probe = DeathProbe(host, self.members, self._clients, self.losses.on_lost)
        self._ticked = asyncio.Event()
        self._complete = asyncio.Event()

    def add_guests(self, guests: Sequence[Guest]) -> None:
        """Adds guests, each with its handlers of messages. Called before `listen`."""
        self.guests.add(guests)
        for guest in guests:
            self.also_handles(guest)

    def gateways(self) -> Sequence[Heartbeat]:
        """Returns the last heartbeat of each living gateway, this one included."""
        return self._gateways.alive("gateway", self._now())

    async def listen(self) -> None:
        """Subscribes to this process's subjects and to the heartbeats of the other services."""
        subjects, here = self.host.subjects, (self.host.id, self.host.instance_id)
        await self.bind(subjects.gateway_text(*here), TextEvents)
        await self.bind(subjects.gateway_tokens(*here), TokenEvents)
        # Guests handle some of these messages.
        await self.bind_handled(subjects.gateway_control(*here), ProgressReply, OwnershipQuery, SelfTestReply)
        await self.bind_handled(subjects.gateway_peers(*here), RecordListQuery, RecordQuery, StreamTaken)
        await self.bind(subjects.models(), ModelsChanged)
        await self._probe.listen()
        await self.versions.read()
        for guest in self.guests:
            await guest.listen()
        for service in (*SERVICES, VISION):
            await self.bind(subjects.heartbeats(service), Heartbeat)
        await self.bind(subjects.heartbeats("gateway"), Heartbeat)

    # --- members ---

    def engines(self) -> Sequence[Heartbeat]:
        """Returns the last heartbeat of each living engine, for metrics."""
        return self.members.alive("engine", self._now())

    def topology(self) -> list[tuple[Heartbeat, float]]:
        """Returns the last heartbeat of each member of all services, with the seconds since it arrived.

        A member that is silent and not given up (`Losses.is_alone`) has the state `stalled`: it gets no work either.
        """
        now = self._now()
        silent = {beat.instance_id for beat, _ in self.members.overdue(now)}
        return [
            (replace(beat, state="stalled") if beat.instance_id in silent else beat, age_s)
            for beat, age_s in (*self._gateways.ages(now), *self.members.ages(now))
        ]

    async def first_heartbeats(self) -> None:
        """Waits until every known model has a ready member of each service, at most FIRST_HEARTBEATS_S.

        Before that, a service that seems to be missing may just not have sent its first heartbeat yet.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.FIRST_HEARTBEATS_S):
                await self._complete.wait()

    # --- messages ---

    @handles(TextEvents)
    def on_text_events(self, envelope: Envelope[TextEvents]) -> None:
        """Passes each event to its request."""
        message = envelope.message
        engine = Address(message.engine_id, message.engine_instance_id)
        sender = Address(message.detokenizer_id, message.detokenizer_instance_id)
        for event in message.events:
            found = self.backend.find(event.sequence_id)
            if found is None or not found[0].placements.has_stream(found[1], sender):
                self.unknown_events += 1
                continue
            actor, index = found
            actor.on_text(index, event, engine)
            actor.request.origin.record.detokenized(message.work_us)
        self.parts.dispatcher.pump()

    @handles(TokenEvents)
    def on_token_events(self, envelope: Envelope[TokenEvents]) -> None:
        """Passes vectors of pooling sequences to their requests, and tokens to the guests whose sequences they are."""
        message = envelope.message
        engine = Address(message.engine_id, message.engine_instance_id)
        for event in message.events:
            if self.guests.on_tokens(event, engine):
                continue
            found = self.backend.find(event.sequence_id)
            if found is None or found[0].request.pooling is None:
                self.unknown_events += 1
                continue
            actor, index = found
            actor.on_vector(index, event, engine)
        self.parts.dispatcher.pump()

    @handles(ProgressReply)
    def on_progress_reply(self, envelope: Envelope[ProgressReply]) -> None:
        """Passes an engine's report to the requests: the progress of its sequences, and unknown sequences."""
        reply = envelope.message
        engine = Address(reply.engine_id, reply.engine_instance_id)
        for guest in self.guests:
            guest.on_progress(reply.marks, reply.missing, engine)
        for mark in reply.marks:
            if found := self.backend.find(mark.sequence_id):
                found[0].placements.on_mark(found[1], mark, engine)
        for ref in reply.missing:
            if found := self.backend.find(ref.sequence_id):
                found[0].placements.on_missing(found[1], ref.attempt, engine)
        self.parts.dispatcher.pump()

    @handles(OwnershipQuery)
    def on_ownership_query(self, envelope: Envelope[OwnershipQuery]) -> None:
        """Answers an engine or a detokenizer which of its sequences this gateway no longer owns."""
        query = envelope.message
        member = Address(query.member_id, query.member_instance_id)
        released = [ref for ref in query.sequences if not self._owns(ref, member)]
        if not self._clients.tell_released(query, released):
            self.drop(envelope.subject, "the answer would go to somebody else")

    @handles(ModelsChanged)
    def on_models_changed(self, envelope: Envelope[ModelsChanged]) -> None:
        """Updates which version of a model gets new requests."""
        self.versions.changed(envelope.message)

    @handles(Heartbeat)
    def on_heartbeat(self, envelope: Envelope[Heartbeat]) -> None:
        """Updates the table of members and runs the liveness check if it is due.

        A new instance id means that the process was restarted: the sequences on the old process are lost.
        """
        beat = heard_on(self, envelope, self.host.subjects)
        if beat is None:
            return
        now = self._now()
        if beat.service == "gateway":
            self._hear_gateway(beat, now)
            return
        before = self.members.get(beat.service, beat.id)
        self.catalog.observe(beat)
        for guest in self.guests:
            guest.on_heartbeat(beat)
        for lost in self.members.observe(beat, now):
            self.losses.on_lost(lost, RESTARTED)
        if not self._complete.is_set() and self.catalog.is_complete() and self.guests.is_settled():
            self._complete.set()
        if self.members.get(beat.service, beat.id) is beat:
            self.losses.heard(beat, was_lost=self.changes.observe(beat, before))
            address = Address(beat.id, beat.instance_id)
            if beat.state == "faulty" or (beat.state == "stalled" and not self.losses.is_alone(beat)):
                self.losses.leave(address)
            elif beat.state == "draining" or (beat.state == "sleeping" and has_sequences(beat)):
                self.losses.move_away(beat, now)
        if beat.service not in ("tokenizer", VISION):
            self.parts.dispatcher.pump()
        if self._pulse.is_due(now):
            self.tick(now)

    def _hear_gateway(self, beat: Heartbeat, now: float) -> None:
        before = self._gateways.get(beat.service, beat.id)
        for lost in self._gateways.observe(beat, now):
            self.losses.tell(lost, RESTARTED)
        if self._gateways.get(beat.service, beat.id) is beat:
            self.losses.heard(beat, was_lost=self.changes.observe(beat, before))

    # --- time ---

    async def watch(self) -> None:
        """Calls `tick` if no heartbeat does, and asks engines for progress after each tick, until cancelled."""
        while True:
            self._ticked.clear()
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._ticked.wait()
            except TimeoutError:
                self.tick(self._now())
            await self._ask_progress()

    def tick(self, now: float) -> None:
        """Runs the liveness check: expired leases, streams without new text, sequences that no member can accept."""
        self._ticked.set()
        if self._pulse.link_changed():
            self._follow_link(now)
        if not self._pulse.stood_still(now):
            for lost, silent_s in self.members.expire_silent(now, self.losses.is_alone):
                self.losses.on_lost(lost, silent(silent_s))
            for gateway, silent_s in self._gateways.expire_silent(now):
                self.losses.tell(gateway, silent(silent_s))
            for beat, silent_s in self.members.overdue(now):
                self.losses.tell_silence(beat, silent_s)
            self._probe.tick(now)
            self._tick_requests(now)
            self.parts.dispatcher.expire(now)
        self.backend.note_quiet()

    def _tick_requests(self, now: float) -> None:
        if self._pulse.connected:
            for guest in self.guests:
                guest.tick()
            for actor in list(self.backend.requests.values()):
                actor.placements.tick(now)

    async def _ask_progress(self) -> None:
        """Asks each engine, in one bounded message, for the progress of its sequences that had no text for STALL_S."""
        now, watch = self._now(), self.parts.watch
        if not self._pulse.connected or self._pulse.was_late:
            return
        for engine in watch.engines():
            known = self.members.get("engine", engine.id)
            if known is None or known.instance_id != engine.instance_id:
                # The engine was lost after it answered, so its sequences are placed again.
                self.losses.forget(engine)
                continue
            names = watch.overdue(engine, now)
            refs = tuple(ref for name in names if (ref := self._ref(name, engine)) is not None)
            if refs:
                await self._send_query(engine, refs)

    async def _send_query(self, engine: Address, refs: tuple[SequenceRef, ...]) -> None:
        try:
            await self._clients.ask_progress(engine, refs)
        except ServiceError as error:
            log.warning("%s could not ask %s for progress: %s", self.name, engine.id, error)

    async def on_stop(self) -> None:
        """Ends what the guests have started."""
        for guest in self.guests:
            guest.close()

    async def on_crash(self, error: BaseException) -> None:
        """Ends every request with an error, which its client receives."""
        self.backend.fail_all(ServiceError("internal_error", "The gateway failed while it served this request."))

    # --- inside ---

    def _ref(self, name: str, engine: Address) -> SequenceRef | None:
        found = self.backend.find(name)
        if found is None:
            if (own := self.guests.reference(name)) is None:
                self.parts.watch.drop(engine, name)
            return own
        return SequenceRef(name, found[0].sequences[found[1]].attempt)

    def _owns(self, ref: SequenceRef, member: Address) -> bool:
        found = self.backend.find(ref.sequence_id)
        if found is None:
            return self.guests.owns(ref, member)
        return found[0].placements.owns(found[1], ref.attempt, member)

    def _follow_link(self, now: float) -> None:
        """Suspends all leases while this gateway is disconnected from the bus; meanwhile no member counts as dead."""
        if not self._pulse.connected:
            self.members.suspend(now)
            self._gateways.suspend(now)
            return
        self.members.resume(now)
        self._gateways.resume(now)
        self.parts.watch.touch_all(now)
        for actor in self.backend.requests.values():
            actor.resumed(now)

    def _now(self) -> float:
        return self.host.clock.monotonic()
