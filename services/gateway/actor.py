"""The gateway's actor: every request's events and heartbeats come through here, and the HTTP edge asks it to generate.

It holds the table of requests, hands each text event to the request that owns it, watches members come and go, and
ticks. What happens within one request is the request actor's business.
"""

import asyncio

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.model_catalog import RETRY_AFTER_S, SERVICES, ModelCatalog
from services.gateway.owner import Address
from services.gateway.peers import Peers
from services.gateway.placement import PlacementBoard
from services.gateway.prompts import text_size, tokenize_message
from services.gateway.request_actor import RequestActor, split_sequence_id
from shared import limits
from shared.actors.actor import Actor, Envelope, handles
from shared.actors.host import Host
from shared.actors.presence import Members
from shared.codec import pack_ids, unpack_ids
from shared.errors import ServiceError
from shared.messages import (
    DetokenizeReply,
    DetokenizeRequest,
    EngineStatus,
    GatewayStatus,
    Heartbeat,
    LiveRequest,
    TextEvents,
    TokenizeReply,
)

TICK_S = limits.HEARTBEAT_INTERVAL_S
"""Between two looks at what has gone silent: with a heartbeat, for a process that wakes for nothing else costs most.
Heartbeats come at the same beats, some a little late: one that comes after half of the time will do."""
WATCH_S = 1.5 * TICK_S
"""The same where no heartbeat comes."""
OWN_PAUSE_S = limits.LEASE_S / 2
"""From one tick to the next; after a longer one silence says nothing of others."""


class GatewayActor(Actor):
    """One gateway on the bus. Implements `generation.Backend`."""

    def __init__(self, host: Host, default_model: str = "") -> None:
        super().__init__(f"gateway {host.id}", host.transport)
        self.members = Members()
        self.requests: dict[str, RequestActor] = {}
        self.unknown_events = 0
        self._host = host
        self._board = PlacementBoard()
        self._peers = Peers(host, self.members)
        self._catalog = ModelCatalog(self.members, host.clock, default_model, self._judging_time)
        self._draining = False
        self._connected = True
        self._ticked_at, self._was_late = self._now(), False
        self._ticked = asyncio.Event()
        self._quiet = asyncio.Event()

    async def listen(self) -> None:
        """Binds the text subject and the heartbeats of whom it needs."""
        subjects = self._host.subjects
        await self.bind(subjects.gateway_text(self._host.id, self._host.boot), TextEvents)
        for service in SERVICES:
            await self.bind(subjects.heartbeats(service), Heartbeat)

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
        if len(self.requests) >= limits.GATEWAY_REQUESTS_MAX:
            raise ServiceError(
                "server_is_overloaded",
                "The server has too many requests. Try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        if not self._host.transport.connected:
            raise ServiceError(
                "bus_unavailable", "The bus cannot be reached. Try again shortly.", retry_after_s=RETRY_AFTER_S
            )
        card = self.resolve_model(request.model)
        actor = RequestActor(self._host, self.members, self._board, self._peers, request, card)
        self.requests[request.request_id] = actor
        actor.start()
        return actor

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        """See Backend."""
        message = tokenize_message(request, self.resolve_model(request.model), 0, return_tokens=return_tokens)
        reply = await self._peers.tokenizer(message, text_size(request), request.trace_headers)
        assert isinstance(reply, TokenizeReply)
        return [(unpack_ids(prompt.token_ids), list(prompt.tokens)) for prompt in reply.prompts]

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """See Backend."""
        card = self.resolve_model(model)
        message = DetokenizeRequest("detokenize", card.name, pack_ids(token_ids))
        reply = await self._peers.tokenizer(message, len(token_ids), None)
        assert isinstance(reply, DetokenizeReply)
        return reply.text

    def ready(self) -> str:
        """See Backend."""
        if self._draining:
            return "The gateway is shutting down."
        if not self._host.transport.connected:
            return "The bus cannot be reached."
        return self._catalog.waiting_for()

    def engines(self) -> list[Heartbeat]:
        """The engines' last heartbeats, for metrics."""
        return self.members.alive("engine", self._now())

    # --- messages ---

    @handles(TextEvents)
    def on_text_events(self, envelope: Envelope) -> None:
        """Hands each event to its request."""
        message = envelope.message
        assert isinstance(message, TextEvents)
        engine = Address(message.engine_id, message.engine_boot)
        for event in message.events:
            found = self._find(event.request_id)
            if found is None:
                self.unknown_events += 1
                continue
            actor, index = found
            actor.on_text(index, event, engine)

    @handles(Heartbeat)
    def on_heartbeat(self, envelope: Envelope) -> None:
        """Keeps the table of members; a new boot means that the old one is lost."""
        beat = envelope.message
        assert isinstance(beat, Heartbeat)
        now = self._now()
        self._catalog.observe(beat)
        for lost in self.members.observe(beat, now):
            self._lost(lost)
        if beat.state == "stalled" and self.members.get(beat.service, beat.id) is beat:
            self._stalled(beat)
        for mark in beat.status.sequences if isinstance(beat.status, EngineStatus) else ():
            found = self._find(mark.request_id)
            if found is not None and found[0].sequences[found[1]].engine == (beat.id, beat.boot):
                found[0].on_mark(found[1], mark)
        if now - self._ticked_at >= TICK_S / 2:
            self.tick(now)

    # --- time ---

    async def watch(self) -> None:
        """Ticks for ever where nothing else does."""
        while True:
            self._ticked.clear()
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._ticked.wait()
            except TimeoutError:
                self.tick(self._now())

    def tick(self, now: float) -> None:
        """Looks after leases, stalls, and requests that are over."""
        self._ticked.set()
        self._follow_link(now)
        if not self._stood_still(now):
            for lost in self.members.expire(now):
                self._lost(lost)
            self._tick_requests(now)
        if not self.requests:
            self._quiet.set()

    def _tick_requests(self, now: float) -> None:
        for request_id, actor in list(self.requests.items()):
            if actor.over:
                del self.requests[request_id]
            elif self._connected:
                actor.tick(now)

    def status(self) -> GatewayStatus:
        """The sequences that this gateway owns, for heartbeats."""
        live = tuple(
            LiveRequest(sequence.request_id, sequence.epoch)
            for actor in list(self.requests.values())
            if not actor.over
            for sequence in actor.sequences
            if sequence.epoch
        )
        return GatewayStatus(len(self.requests), live)

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones have ended."""
        self._draining = True
        self._quiet.clear()
        await self._quiet.wait()

    async def on_crash(self, error: BaseException) -> None:
        """Every request ends with an error that its client can read."""
        for actor in self.requests.values():
            actor.fail(ServiceError("internal_error", "The gateway failed while it served this request."))

    # --- inside ---

    def _find(self, name: str) -> tuple[RequestActor, int] | None:
        try:
            request_id, index = split_sequence_id(name)
        except ValueError:
            return None
        actor = self.requests.get(request_id)
        return (actor, index) if actor is not None and not actor.over and index < len(actor.sequences) else None

    def _lost(self, beat: Heartbeat) -> None:
        member = Address(beat.id, beat.boot)
        self._board.forget(member)
        for actor in list(self.requests.values()):
            if not actor.over:
                actor.on_lost(member)

    def _stalled(self, beat: Heartbeat) -> None:
        """Its work stands still: what runs there goes elsewhere. It lives, so it is told, for when it goes on."""
        member = Address(beat.id, beat.boot)
        for actor in list(self.requests.values()):
            if not actor.over:
                actor.on_stalled(member)

    def _follow_link(self, now: float) -> None:
        """While our own link is down nobody is declared dead."""
        connected = self._host.transport.connected
        if connected != self._connected:
            self._connected = connected
            (self.members.resume if connected else self.members.suspend)(now)
            for actor in self.requests.values() if connected else ():
                actor.resumed(now)

    def _stood_still(self, now: float) -> bool:
        """Whether this process itself was silent: what others said meanwhile is still to be read, by the next tick."""
        late = now - self._ticked_at > OWN_PAUSE_S and not self._was_late
        self._ticked_at, self._was_late = now, late
        return late

    def _judging_time(self) -> float:
        """Now, or the last tick where this process stood still since: reading a long body takes longer than a lease."""
        now = self._now()
        return self._ticked_at if now - self._ticked_at > OWN_PAUSE_S else now

    def _now(self) -> float:
        return self._host.clock.monotonic()
