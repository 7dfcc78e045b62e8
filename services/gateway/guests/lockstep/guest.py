"""Lockstep in one gateway: selects the requests, chooses engines for copies, and quarantines engines that are wrong."""

import asyncio
import random
import secrets
from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter

from prometheus_client.registry import Collector

from antiphon.services.gateway.guests.lockstep.copies import Copies, Draft
from antiphon.services.gateway.guests.lockstep.counts import Counts
from antiphon.services.gateway.guests.lockstep.metrics import LockstepCollector
from antiphon.services.gateway.guests.lockstep.sequence import LockstepSequence, Subject
from antiphon.services.gateway.guests.lockstep.trust import Trust, twins, with_twins
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.guest import Guest, RequestGuest, Running
from antiphon.services.gateway.path.messages import RequestMessages
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared import limits
from antiphon.shared.actors.actor import Envelope, handles
from antiphon.shared.actors.background import Background
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    EngineStatus,
    Heartbeat,
    SelfTest,
    SelfTestReply,
    SequenceMark,
    SequenceRef,
    TextEvent,
    TokenEvent,
)

HEADER = "X-Antiphon-Lockstep"


class LockstepRequest(RequestGuest):
    """The sequences of one request in lockstep."""

    exact = True

    def __init__(self, lockstep: "Lockstep", running: Running) -> None:
        self._lockstep, self._running = lockstep, running
        self._sequences: list[LockstepSequence] = []

    def tokenized(self, messages: RequestMessages) -> None:
        """See RequestGuest."""
        required, running = bool(messages.request.guests.lockstep), self._running
        subjects = (Subject(running, messages, index, required) for index in range(len(messages.sequences)))
        self._sequences = [LockstepSequence(self._lockstep, one, running.spawn) for one in subjects]
        self._lockstep.running.add(self)

    def eligible(self, engines: Sequence[Heartbeat], model: str) -> Sequence[Heartbeat]:
        """See RequestGuest: there must be a second engine that computes the same."""
        return with_twins(engines, model) or engines

    def on_text(self, index: int, event: TextEvent, engine: Address) -> bool:
        """See RequestGuest. Text on which both engines agree is passed on."""
        self._sequences[index].on_text(event, engine)
        return True

    def holds(self, index: int) -> bool:
        """See `LockstepSequence`."""
        return self._sequences[index].holds

    def placed(self) -> None:
        """See RequestGuest."""
        self.advance()

    def advance(self) -> None:
        """Places missing copies and releases text on which both engines agree."""
        for sequence in self._sequences:
            sequence.advance()

    def ended(self) -> None:
        """See RequestGuest. Ends the copies."""
        for sequence in self._sequences:
            sequence.end()
        self._lockstep.running.discard(self)


class Lockstep(Guest):
    """The lockstep of one gateway. `share`: share of the requests that run in lockstep without asking for it."""

    def __init__(self, gateway: GatewayActor, share: float = 0.0) -> None:
        parts = gateway.parts
        self._background = Background("a comparison of engines failed")
        self.copies = Copies(
            host=parts.host, router=parts.router, clients=parts.clients, watch=parts.watch, spawn=self._background.spawn
        )
        self.counts = Counts()
        self.trust = Trust()
        self._gateway = gateway
        self._host, self._members, self._router, self._clients = parts.host, parts.members, parts.router, parts.clients
        self._share = share
        self.asked_by = None if share else attrgetter("guests.lockstep")
        self.running: set[LockstepRequest] = set()
        self._tests: dict[str, asyncio.Future[str]] = {}
        self._paired_at: dict[str, float] = {}
        """The last time at which each model had two comparable engines; entries are kept for `LOCKSTEP_GRACE_S`."""

    def collectors(self) -> Iterable[Collector]:
        """See Guest."""
        return (LockstepCollector(self.counts, self.trust, self._gateway.engines),)

    # --- requests ---

    def joins(self, request: GenerationRequest, card: ModelCard, running: Running | None) -> LockstepRequest | None:
        """See Guest."""
        admitted = running is not None and self._admits(request, card.served_by)
        return LockstepRequest(self, running) if running is not None and admitted else None

    def _admits(self, request: GenerationRequest, model: str) -> bool:
        """Whether a request runs in lockstep.

        Raises ServiceError if the request asks for lockstep and it is not possible.
        """
        if request.guests.lockstep is False or not (request.guests.lockstep or random.random() < self._share):
            return False
        error = self._obstacle(request, model)
        if error is None:
            self.counts.requests += 1
        elif request.guests.lockstep:
            raise error
        else:
            self.counts.unavailable += 1
        return error is None

    def _obstacle(self, request: GenerationRequest, model: str) -> ServiceError | None:
        if request.pooling is not None or request.params.beam is not None:
            message = f"Embeddings and beam searches cannot run in lockstep: send the request without {HEADER}."
            return ServiceError("unsupported_parameter", message, param=HEADER)
        if not with_twins(self._trusted(), model) and not (request.guests.lockstep and self._were_paired(model)):
            message = (
                f"Lockstep needs two ready engines of the model {model!r} with the same configuration and a backend "
                f"that is batch invariant (the CPU backend). Start them, or send the request without {HEADER}."
            )
            return ServiceError("no_engine", message, retry_after_s=2.0)
        return None

    def _were_paired(self, model: str) -> bool:
        """Whether a model had two comparable engines a moment ago.

        The heartbeats of a busy machine may be late, and an engine may restart. A request that asks for lockstep then
        waits for the second engine, as it does when that one is lost later.
        """
        return self.now() - self._paired_at.get(model, -inf) <= limits.LOCKSTEP_GRACE_S

    # --- engines ---

    def twins(self, engine: Address) -> list[Heartbeat] | None:
        """Returns the trusted engines that must compute the same as this one; None if this engine is gone."""
        beat, trusted = self.heartbeat(engine), self._trusted()
        return None if beat is None else [one for one in twins(beat, trusted) if one.id != engine.id]

    def choose(self, engines: Sequence[Heartbeat], draft: Draft) -> Heartbeat | None:
        """Returns the cheapest of the engines with credit; None if none has any."""
        request, prompt = draft.messages.request, draft.messages.prompt(draft.index)
        model, num_tokens = draft.messages.card.served_by, prompt.num_tokens + len(draft.token_ids)
        return self._router.choose_engine(engines, model, num_tokens, (), client=request.origin.client.name)

    def another(self, engines: tuple[Address, Address]) -> Heartbeat | None:
        """Returns a third engine that can decide a difference between these two; None if there is none."""
        names = {engine.id for engine in engines}
        return next((one for one in self.twins(engines[0]) or () if one.id not in names), None)

    def heartbeat(self, engine: Address) -> Heartbeat | None:
        """Returns the last heartbeat of a living engine."""
        alive = self._members.alive("engine", self.now())
        return next((beat for beat in alive if (beat.id, beat.instance_id) == engine), None)

    async def self_test(self, engine: Address, *, ends: bool = False) -> str | None:
        """Makes an engine test itself. With `ends`, the engine exits afterwards, whatever the result.

        Returns the fault found, the empty string if there is none, and None if the engine does not answer.
        """
        name = secrets.token_hex(8)
        answer = self._tests[name] = asyncio.get_running_loop().create_future()
        reply_subject = self._host.subjects.gateway_control(self._host.id, self._host.instance_id)
        try:
            async with asyncio.timeout(limits.SELF_TEST_S):
                await self._clients.self_test(engine, SelfTest(name, reply_subject, ends))
                return await answer
        except (TimeoutError, ServiceError):
            return None
        finally:
            del self._tests[name]

    def condemned(self, engine: Address) -> str:
        """See `sequence.Engines`."""
        return self.trust.quarantined.get(engine, "")

    def quarantine(self, engine: Address, reason: str) -> None:
        """Stops sending work to an engine, moves its sequences, and tells it to test itself and exit."""
        if self.trust.quarantine(engine, reason):
            self.counts.quarantined += 1
            self._gateway.losses.leave(engine)
            self._background.spawn(self._end_engine(engine))

    async def _end_engine(self, engine: Address) -> None:
        await self.self_test(engine, ends=True)

    # --- messages and time ---

    def on_tokens(self, event: TokenEvent, engine: Address) -> bool:
        """See Guest."""
        return self.copies.on_tokens(event, engine)

    def on_progress(self, marks: Iterable[SequenceMark], missing: Iterable[SequenceRef], engine: Address) -> None:
        """See Guest."""
        for mark in marks:
            self.copies.on_mark(mark, engine)
        for ref in missing:
            self.copies.on_missing(ref, engine)

    def reference(self, name: str) -> SequenceRef | None:
        """See Guest."""
        return self.copies.ref(name)

    def owns(self, ref: SequenceRef, member: Address) -> bool:
        """See Guest."""
        return self.copies.owns(ref, member)

    def on_lost(self, member: Address) -> None:
        """See Guest."""
        self.copies.on_member_lost(member)

    def eligible(self, engines: Sequence[Heartbeat]) -> Sequence[Heartbeat]:
        """See Guest: engines that were found wrong get no work."""
        return self.trust.trusted(engines)

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """See Guest."""
        if beat.service == "engine" and beat.state == "faulty":
            self.trust.quarantine(Address(beat.id, beat.instance_id), "it has found itself faulty")

    @handles(SelfTestReply)
    def on_self_test(self, envelope: Envelope[SelfTestReply]) -> None:
        """Handles an engine's answer to a self-test request."""
        reply = envelope.message
        answer = self._tests.get(reply.test_id)
        if answer is not None and not answer.done():
            answer.set_result(reply.fault)

    def tick(self) -> None:
        """See Guest. Tries again to place copies that found no credit. Notes which models have comparable engines."""
        trusted, now = self._trusted(), self.now()
        models = {engine.status.model for engine in trusted if isinstance(engine.status, EngineStatus)}
        recent = {model: at for model, at in self._paired_at.items() if now - at <= limits.LOCKSTEP_GRACE_S}
        self._paired_at = recent | {model: now for model in models if with_twins(trusted, model)}
        for request in list(self.running):
            request.advance()

    def now(self) -> float:
        """Returns the monotonic time in seconds."""
        return self._host.clock.monotonic()

    def _trusted(self) -> Sequence[Heartbeat]:
        return self.trust.trusted(self._members.alive("engine", self.now()))


def make(gateway: GatewayActor, settings: GatewaySettings) -> Lockstep:
    """See `guests.make_guests`."""
    return Lockstep(gateway, settings.lockstep)
