"""The gateway's actor: receives all messages for the gateway, and starts requests for the HTTP edge.

The actor has the table of requests, passes each text event to its request, tracks the members (running service
processes) by their heartbeats, and asks engines about sequences without progress. A request actor handles a single
request; `dispatcher` assigns sequences to engines.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from services.gateway.access.call import current_call
from services.gateway.access.turns import within
from services.gateway.adapters.directory import AdapterDirectory
from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.model_catalog import RETRY_AFTER_S, SERVICES, VISION, ModelCatalog
from services.gateway.model_versions import VersionDirectory
from services.gateway.pictures.remote import RemotePictures
from services.gateway.pictures.store import PictureStore
from services.gateway.record import BusRecordDirectory, Recorder
from services.gateway.requests.bus_wait import BusWait
from services.gateway.requests.deliveries import Deliveries
from services.gateway.requests.gateway_parts import GatewayParts
from services.gateway.requests.liveness.death_probe import DeathProbe
from services.gateway.requests.liveness.progress_watch import ProgressWatch
from services.gateway.requests.lockstep.coordinator import Lockstep
from services.gateway.requests.lockstep.trust import Trust
from services.gateway.requests.messages import split_sequence_id
from services.gateway.requests.placement.dispatcher import Dispatcher
from services.gateway.requests.placement.engine_controls import EngineControls
from services.gateway.requests.placement.moves import Moves
from services.gateway.requests.preparation import prepare, tokenize_only
from services.gateway.requests.request_actor import RequestActor
from services.gateway.requests.router import Router, model_of
from services.gateway.requests.sequence_state import Address
from services.gateway.requests.service_clients import ServiceClients
from services.gateway.shadow import ShadowTraffic
from shared import limits
from shared.actors.actor import Actor, Envelope, handles, tell_in_parts
from shared.actors.host import Host
from shared.actors.presence import Members
from shared.blocks import adapter_salt
from shared.codec import pack_ids, unpack_ids
from shared.errors import ServiceError
from shared.messages import (
    AdaptersChanged,
    DetokenizeReply,
    DetokenizeRequest,
    GatewayStatus,
    Heartbeat,
    ModelsChanged,
    OwnershipQuery,
    OwnershipReply,
    PicturePart,
    ProgressReply,
    ReadPicture,
    RecordList,
    RecordListQuery,
    RecordQuery,
    RecordReply,
    SelfTestReply,
    SequenceRef,
    StepEvents,
    StreamTaken,
    TextEvents,
    TokenEvents,
)
from shared.parameters.pooling import generates_nothing

log = logging.getLogger(__name__)
TICK_S = limits.HEARTBEAT_INTERVAL_S
"""Interval of the liveness check (`tick`), in seconds. The check runs when a heartbeat arrives, so that an idle process
is not woken just for this check. Heartbeats of all members arrive at almost the same time; the first one that arrives
at least half an interval after the last check starts the next check.
"""
WATCH_S = 1.5 * TICK_S
"""Time without a liveness check after which `watch` runs it, because no heartbeat has arrived. Seconds."""
OWN_PAUSE_S = limits.LEASE_S - TICK_S
"""If two ticks are further apart than this, in seconds, this process itself was delayed. Messages that arrived
meanwhile may not be handled yet, so the silence of members does not count."""


class GatewayActor(Actor):
    """One gateway on the bus. Implements `generation.Backend`."""

    def __init__(
        self,
        host: Host,
        default_model: str = "",
        required_engines: Sequence[str] = (),
        recorder: Recorder | None = None,
        remote_pictures: RemotePictures | None = None,
        lockstep: float = 0.0,
        max_queue_wait: float = 0.0,
    ) -> None:
        """`recorder` stores the engines' step events; by default engines do not send any.

        `remote_pictures` fetches pictures from the network; by default none are fetched. `lockstep`: see `Lockstep`.
        `max_queue_wait`: requests are refused if their expected wait is longer, seconds; 0: never.
        """
        self._max_queue_wait_s = max_queue_wait
        super().__init__(f"gateway {host.id}", host.transport)
        self.members = Members()
        self._gateways = Members()
        """The gateways, this one included; only for the topology."""
        self.requests: dict[str, RequestActor] = {}
        self.unknown_events = 0
        self.recorder = recorder or Recorder(0)
        self.records = BusRecordDirectory(self.recorder, host, lambda: self._gateways.alive("gateway", self._now()))
        self._host = host
        router, clients, watch, trust = Router(), ServiceClients(host, self.members), ProgressWatch(), Trust()
        self.lockstep = Lockstep(host, self.members, router, clients, watch, trust, lockstep)
        self.lockstep.on_quarantine = self._stalled
        source = host.subjects.gateway_pictures(host.id, host.instance_id)
        self.pictures = PictureStore(remote_pictures or RemotePictures(""), source)
        self._clients = clients
        self._probe = DeathProbe(host, self.members, clients, self._lost)
        self._parts = GatewayParts(
            host, self.members, router, clients, Dispatcher(host, self.members, router, clients, trust),
            watch, Moves(), self.pictures, self.lockstep, BusWait(host), Deliveries(),
        )  # fmt: skip
        self.engine_controls = EngineControls(host, self.members, self._parts.moves)
        self._num_requests = self._num_ended = self._num_sequences = self._num_idle = 0
        """`_num_idle`: number of the sequences whose requests began in the idle lane (`idle_s` above 0)."""
        self._adapters = AdapterDirectory(host, self.members)
        self.versions = VersionDirectory(host)
        self._catalog = ModelCatalog(
            self.members, host.clock, default_model, self._judging_time,
            required_engines, self._adapters, self.versions, trust.trusted,
        )  # fmt: skip
        self.shadow = ShadowTraffic(self.versions, self._start, self._catalog.find_on_bus)
        self._draining = False
        self._connected = True
        self._ticked_at, self._was_late = self._now(), False
        self._ticked = asyncio.Event()
        self.on_stream_taken: Callable[[StreamTaken], None] | None = None
        self._quiet = asyncio.Event()
        self._complete = asyncio.Event()

    async def listen(self) -> None:
        """Subscribes to this process's subjects and to the heartbeats of the other services."""
        subjects, here = self._host.subjects, (self._host.id, self._host.instance_id)
        await self.bind(subjects.gateway_text(*here), TextEvents)
        await self.bind(subjects.gateway_tokens(*here), TokenEvents)
        control = ProgressReply, OwnershipQuery, RecordListQuery, RecordQuery, StreamTaken, SelfTestReply
        await self.bind(subjects.gateway_control(*here), *control)
        await self.bind(subjects.all_adapters(), AdaptersChanged)
        await self.bind(subjects.models(), ModelsChanged)
        await self._probe.listen()
        await self.versions.read()
        await self.bind(subjects.gateway_pictures(*here), ReadPicture)
        for service in (*SERVICES, VISION):
            await self.bind(subjects.heartbeats(service), Heartbeat)
        await self.bind(subjects.heartbeats("gateway"), Heartbeat)
        if self.recorder.is_on:
            await self.bind(subjects.steps(), StepEvents)

    # --- Backend ---

    def models(self) -> list[ModelCard]:
        """See Backend."""
        return self._catalog.cards()

    def resolve_model(self, name: str | None) -> ModelCard:
        """See Backend."""
        return self._catalog.resolve(name)

    def generate(self, request: GenerationRequest) -> RequestActor:
        """See Backend."""
        if self._draining:
            raise ServiceError("draining", "The server is shutting down.", retry_after_s=RETRY_AFTER_S)
        count = request.num_prompts * request.num_sequences
        too_many = self._num_sequences + count > limits.GATEWAY_SEQUENCES_MAX
        too_many |= request.idle_s > 0 and self._num_idle + count > limits.GATEWAY_IDLE_SEQUENCES_MAX
        if too_many or len(self.requests) >= limits.GATEWAY_REQUESTS_MAX:
            raise ServiceError(
                "server_is_overloaded",
                "The server has too many requests. Try again later.",
                retry_after_s=self._parts.dispatcher.retry_after_s(),
            )
        self._parts.bus.check()
        card = self.resolve_model(request.model)
        if request.pooling is None and not card.generates:
            raise generates_nothing(len(card.labels))
        self._check_wait(request, card.served_by)
        in_lockstep = self.lockstep.admits(request, card.served_by)
        if card.adapter_version:
            # The adapter's version is resolved once: the request keeps it even if the adapter is replaced or unloaded.
            request = replace(request, cache_salt=adapter_salt(request.cache_salt, card.adapter_version))

        return self._start(request, card, copies=True, in_lockstep=in_lockstep)

    def _check_wait(self, request: GenerationRequest, model: str) -> None:
        """Raises ServiceError if a request that is not idle would wait for an engine longer than `--max-queue-wait`."""
        most, dispatcher = self._max_queue_wait_s, self._parts.dispatcher
        if most and not request.idle_s and dispatcher.waits_longer(model, most):
            message = f"A new request would wait longer than {most:g} s. Try again later."
            raise ServiceError("server_is_overloaded", message, retry_after_s=dispatcher.retry_after_s())

    def _start(
        self, request: GenerationRequest, card: ModelCard, *, copies: bool = False, in_lockstep: bool = False
    ) -> RequestActor:
        """Starts a request. `copies`: when it has ended, shadow traffic may run a copy of it."""
        count = request.num_prompts * request.num_sequences
        num_idle = count if request.idle_s > 0 else 0

        def end() -> None:
            self._num_sequences -= count
            self._num_idle -= num_idle
            self._num_ended += 1
            self.requests.pop(request.request_id, None)
            if copies:
                self.shadow.ended(actor)

        self._num_requests += 1
        self._num_sequences += count
        self._num_idle += num_idle
        actor = RequestActor(self._parts, request, card, self._num_requests, end, in_lockstep=in_lockstep)
        self.requests[request.request_id] = actor
        actor.start(within(current_call().turn, prepare(actor, self._parts)))
        return actor

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        """See Backend."""
        card = self.resolve_model(request.model)
        prompts = await tokenize_only(self._parts, request, card, return_tokens=return_tokens)
        return [(unpack_ids(prompt.token_ids), list(prompt.tokens)) for prompt in prompts]

    async def fetch_pictures(self, request: GenerationRequest) -> GenerationRequest:
        """See Backend."""
        return replace(request, pictures=tuple(await self.pictures.fetched(request.pictures)))

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """See Backend."""
        return (await self._detokenized(model, token_ids, return_tokens=False)).text

    async def token_texts(self, model: str, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """See Backend."""
        return (await self._detokenized(model, token_ids, return_tokens=True)).tokens

    async def _detokenized(self, model: str, token_ids: tuple[int, ...], *, return_tokens: bool) -> DetokenizeReply:
        card = self.resolve_model(model)
        message = DetokenizeRequest("detokenize", card.served_by, pack_ids(token_ids), return_tokens)
        reply = await self._clients.tokenizer(message, len(token_ids), None)
        assert isinstance(reply, DetokenizeReply)
        return reply

    async def load_adapter(self, name: str, path: str, base_model: str | None, *, in_place: bool) -> None:
        """See Backend."""
        await self._adapters.load(name, path, self.resolve_model(base_model).served_by, in_place=in_place)

    async def unload_adapter(self, name: str) -> None:
        """See Backend."""
        await self._adapters.unload(name, [card.served_by for card in self._catalog.models()])

    def ready(self) -> str:
        """See Backend."""
        if self._draining:
            return "The gateway is shutting down."
        if not self._host.transport.connected:
            return "The bus cannot be reached."
        return self._catalog.waiting_for()

    def engines(self) -> Sequence[Heartbeat]:
        """Returns the last heartbeat of each living engine, for metrics."""
        return self.members.alive("engine", self._now())

    def topology(self) -> list[tuple[Heartbeat, float]]:
        """Returns the last heartbeat of each living member of all services, with the seconds since it arrived."""
        now = self._now()
        return [*self._gateways.ages(now), *self.members.ages(now)]

    async def first_heartbeats(self) -> None:
        """Waits until every known model has a ready member of each service, at most FIRST_HEARTBEATS_S.

        Before that, a service that seems to be missing may just not have sent its first heartbeat yet.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.FIRST_HEARTBEATS_S):
                await self._complete.wait()

    # --- messages ---

    @handles(TextEvents)
    def on_text_events(self, envelope: Envelope) -> None:
        """Passes each event to its request."""
        message = envelope.message
        assert isinstance(message, TextEvents)
        engine = Address(message.engine_id, message.engine_instance_id)
        self.members.heard("engine", *engine, self._now())
        for event in message.events:
            found = self._find(event.sequence_id)
            if found is None:
                self.unknown_events += 1
                continue
            actor, index = found
            actor.on_text(index, event, engine)
            actor.request.record.detokenized(message.work_us)
        self._parts.dispatcher.pump()

    @handles(TokenEvents)
    def on_token_events(self, envelope: Envelope) -> None:
        """Passes vectors of pooling sequences to their requests, and tokens of lockstep copies to `lockstep`."""
        message = envelope.message
        assert isinstance(message, TokenEvents)
        engine = Address(message.engine_id, message.engine_instance_id)
        for event in message.events:
            if self.lockstep.on_tokens(event, engine):
                continue
            found = self._find(event.sequence_id)
            if found is None or found[0].request.pooling is None:
                self.unknown_events += 1
                continue
            actor, index = found
            actor.on_vector(index, event, engine)
        self._parts.dispatcher.pump()

    @handles(StepEvents)
    def on_step_events(self, envelope: Envelope) -> None:
        """Adds an engine's steps to the records of the requests that they computed."""
        message = envelope.message
        assert isinstance(message, StepEvents)
        self.recorder.add_steps(message)

    @handles(RecordListQuery)
    def on_record_list_query(self, envelope: Envelope) -> RecordList | RecordReply:
        """Tells another gateway which requests this one has recorded."""
        assert isinstance(envelope.message, RecordListQuery)
        return self.records.answer(envelope.message)

    @handles(RecordQuery)
    def on_record_query(self, envelope: Envelope) -> RecordList | RecordReply:
        """Sends another gateway the record of one request."""
        assert isinstance(envelope.message, RecordQuery)
        return self.records.answer(envelope.message)

    @handles(ProgressReply)
    def on_progress_reply(self, envelope: Envelope) -> None:
        """Passes an engine's report to the requests: the progress of its sequences, and unknown sequences."""
        reply = envelope.message
        assert isinstance(reply, ProgressReply)
        engine = Address(reply.engine_id, reply.engine_instance_id)
        self.lockstep.on_progress(reply.marks, reply.missing, engine)
        for mark in reply.marks:
            if found := self._find(mark.sequence_id):
                found[0].on_mark(found[1], mark, engine)
        for ref in reply.missing:
            if found := self._find(ref.sequence_id):
                found[0].on_missing(found[1], ref.attempt, engine)
        self._parts.dispatcher.pump()

    @handles(SelfTestReply)
    def on_self_test_reply(self, envelope: Envelope) -> None:
        """Passes an engine's self-test result to the lockstep."""
        reply = envelope.message
        assert isinstance(reply, SelfTestReply)
        self.lockstep.on_self_test(reply)

    @handles(OwnershipQuery)
    def on_ownership_query(self, envelope: Envelope) -> None:
        """Answers an engine or a detokenizer which of its sequences this gateway no longer owns."""
        query = envelope.message
        assert isinstance(query, OwnershipQuery)
        member = Address(query.member_id, query.member_instance_id)
        released = [ref for ref in query.sequences if not self._owns(ref, member)]

        def reply(part: Sequence[SequenceRef]) -> OwnershipReply:
            return OwnershipReply(self._host.id, self._host.instance_id, tuple(part))

        tell_in_parts(self.transport, query.reply_subject, reply, released)

    @handles(StreamTaken)
    def on_taken(self, envelope: Envelope) -> None:
        """Ends the run of a stream that another gateway has resumed."""
        message = envelope.message
        assert isinstance(message, StreamTaken)
        if self.on_stream_taken is not None:
            self.on_stream_taken(message)

    @handles(AdaptersChanged)
    def on_adapters_changed(self, envelope: Envelope) -> None:
        """Reads the list of a model's LoRA adapters again, from the bucket on the bus."""
        message = envelope.message
        assert isinstance(message, AdaptersChanged)
        self._adapters.changed(message)

    @handles(ReadPicture)
    def on_read_picture(self, envelope: Envelope) -> PicturePart:
        """Sends a part of an image file to an image service."""
        message = envelope.message
        assert isinstance(message, ReadPicture)
        return self.pictures.part(message)

    @handles(ModelsChanged)
    def on_models_changed(self, envelope: Envelope) -> None:
        """Updates which version of a model gets new requests."""
        message = envelope.message
        assert isinstance(message, ModelsChanged)
        self.versions.changed(message)

    @handles(Heartbeat)
    def on_heartbeat(self, envelope: Envelope) -> None:
        """Updates the table of members and runs the liveness check if it is due.

        A new instance id means that the process was restarted: the sequences on the old process are lost.
        """
        beat = envelope.message
        assert isinstance(beat, Heartbeat)
        now = self._now()
        if beat.service == "gateway":
            self._gateways.observe(beat, now)
            return
        self._catalog.observe(beat)
        self._adapters.observe(beat)
        for lost in self.members.observe(beat, now):
            self._lost(Address(lost.id, lost.instance_id))
        if not self._complete.is_set() and self._catalog.is_complete() and self._adapters.is_settled():
            self._complete.set()
        if self.members.get(beat.service, beat.id) is beat:
            address = Address(beat.id, beat.instance_id)
            if beat.state == "faulty":
                self.lockstep.trust.quarantine(address, "it has found itself faulty")
            if beat.state in ("stalled", "faulty"):
                self._stalled(address)
            elif beat.state == "draining":
                self._move_away(beat, now)
        if beat.service not in ("tokenizer", VISION):
            self._parts.dispatcher.pump()
        if now - self._ticked_at >= TICK_S / 2:
            self.tick(now)

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
        self._follow_link(now)
        if not self._stood_still(now):
            for lost in self.members.expire(now):
                self._lost(Address(lost.id, lost.instance_id))
            self._probe.tick(now)
            self._tick_requests(now)
            self._parts.dispatcher.expire(now)
        if not self.requests:
            self._quiet.set()

    def _tick_requests(self, now: float) -> None:
        if self._connected:
            self.lockstep.tick()
            for actor in list(self.requests.values()):
                actor.tick(now)

    async def _ask_progress(self) -> None:
        """Asks each engine, in one bounded message, for the progress of its sequences that had no text for STALL_S."""
        now, watch = self._now(), self._parts.watch
        if not self._connected or self._was_late:
            return
        alive = {Address(beat.id, beat.instance_id) for beat in self.engines()}
        for engine in watch.engines():
            if engine not in alive:
                # The engine was lost after it answered, so its sequences are placed again.
                self._lost(engine)
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

    def status(self) -> GatewayStatus:
        """Returns this gateway's load, for heartbeats."""
        queue = self._parts.dispatcher.queue
        idle = len(queue) - queue.num_ordinary
        return GatewayStatus(len(self.requests), len(queue), self._num_requests, self._num_ended, idle)

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones have ended."""
        self._draining = True
        self._quiet.clear()
        await self._quiet.wait()

    async def on_stop(self) -> None:
        """Ends the threads that download images."""
        self.pictures.close()

    async def on_crash(self, error: BaseException) -> None:
        """Ends every request with an error, which its client receives."""
        self.fail_all(ServiceError("internal_error", "The gateway failed while it served this request."))

    def fail_all(self, error: ServiceError) -> None:
        """Ends every request with an error."""
        for actor in list(self.requests.values()):
            actor.fail(error)

    # --- inside ---

    def _find(self, name: str) -> tuple[RequestActor, int] | None:
        try:
            request_id, index = split_sequence_id(name)
        except ValueError:
            return None
        actor = self.requests.get(request_id)
        return (actor, index) if actor is not None and not actor.over and index < len(actor.sequences) else None

    def _ref(self, name: str, engine: Address) -> SequenceRef | None:
        found = self._find(name)
        if found is None:
            if (copy := self.lockstep.copies.ref(name)) is None:
                self._parts.watch.drop(engine, name)
            return copy
        return SequenceRef(name, found[0].sequences[found[1]].attempt)

    def _owns(self, ref: SequenceRef, member: Address) -> bool:
        found = self._find(ref.sequence_id)
        if found is None:
            return self.lockstep.copies.owns(ref, member)
        return found[0].owns(found[1], ref.attempt, member)

    def _lost(self, member: Address) -> None:
        self._parts.router.forget(member)
        for actor in list(self.requests.values()):
            actor.on_lost(member)
        self.lockstep.copies.on_member_lost(member)
        self._parts.dispatcher.pump()

    def _stalled(self, engine: Address) -> None:
        """Moves the sequences of an engine whose step hangs, or that is faulty, and tells the engine to drop them.

        The engine is told because its process is alive and a step may continue later.
        """
        for actor in list(self.requests.values()):
            actor.on_stalled(engine)
        self.lockstep.copies.on_member_lost(engine)
        self._parts.dispatcher.pump()

    def _move_away(self, beat: Heartbeat, now: float) -> None:
        """Moves sequences or streams from a draining engine or detokenizer to others, as far as these have room.

        Called with each heartbeat of the draining member, so sequences that find no room now move later. Sequences that
        already wait in this gateway's queue get room first.
        """
        room = 0
        if beat.service == "engine":
            model = model_of(beat)
            engines = self.lockstep.trust.trusted(self.members.alive("engine", now))
            room = max(0, self._parts.router.room(engines, model) - self._parts.dispatcher.num_waiting(model))
        member = Address(beat.id, beat.instance_id)
        for actor in list(self.requests.values()):
            room -= actor.on_draining(member, room)
        self._parts.dispatcher.pump()

    def _follow_link(self, now: float) -> None:
        """Suspends all leases while this gateway is disconnected from the bus; meanwhile no member counts as dead."""
        connected = self._host.transport.connected
        if connected != self._connected:
            self._connected = connected
            (self.members.resume if connected else self.members.suspend)(now)
            if connected:
                self._parts.watch.touch_all(now)
                for actor in self.requests.values():
                    actor.resumed(now)

    def _stood_still(self, now: float) -> bool:
        """Whether this process was delayed since the last tick, so received messages may not be handled yet.

        Returns False at the tick after a delayed one: the messages have been handled by then.
        """
        late = now - self._ticked_at > OWN_PAUSE_S and not self._was_late
        self._ticked_at, self._was_late = now, late
        return late

    def _judging_time(self) -> float:
        """Returns the time for checking leases: now, or the time of the last tick if this process was delayed since.

        Reading a long request body may delay the process for longer than a lease.
        """
        now = self._now()
        return self._ticked_at if now - self._ticked_at > OWN_PAUSE_S else now

    def _now(self) -> float:
        return self._host.clock.monotonic()
