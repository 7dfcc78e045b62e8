"""Lockstep in one gateway: selects the requests, chooses engines for copies, and quarantines engines that are wrong."""

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from math import inf
from typing import Any

from services.gateway.generation import GenerationRequest
from services.gateway.requests.liveness.progress_watch import ProgressWatch
from services.gateway.requests.lockstep.copies import Copies, Draft
from services.gateway.requests.lockstep.counts import Counts
from services.gateway.requests.lockstep.sequence import LockstepSequence, Owner, Subject
from services.gateway.requests.lockstep.trust import Trust, twins, with_twins
from services.gateway.requests.messages import RequestMessages
from services.gateway.requests.router import Router
from services.gateway.requests.sequence_state import Address
from services.gateway.requests.service_clients import ServiceClients
from shared import limits
from shared.actors.background import Background
from shared.actors.host import Host
from shared.actors.presence import Members
from shared.errors import ServiceError
from shared.messages import (
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
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class LockstepRequest:
    """The sequences of one request in lockstep."""

    def __init__(self, sequences: Sequence[LockstepSequence], on_end: Callable[["LockstepRequest"], None]) -> None:
        self._sequences, self._on_end = sequences, on_end

    def on_text(self, index: int, event: TextEvent, engine: Address) -> None:
        """Handles a text event. Text on which both engines agree is passed to `Owner.apply_text`."""
        self._sequences[index].on_text(event, engine)

    def holds(self, index: int) -> bool:
        """See `LockstepSequence`."""
        return self._sequences[index].holds

    def advance(self) -> None:
        """Places missing copies and releases text on which both engines agree."""
        for sequence in self._sequences:
            sequence.advance()

    def end(self) -> None:
        """Ends the copies."""
        for sequence in self._sequences:
            sequence.end()
        self._on_end(self)


class Lockstep:
    """The lockstep of one gateway. `share`: share of the requests that run in lockstep without asking for it.

    `on_quarantine` is called when an engine has lost a comparison, so that its sequences move to other engines.
    """

    def __init__(
        self,
        host: Host,
        members: Members,
        router: Router,
        clients: ServiceClients,
        watch: ProgressWatch,
        trust: Trust,
        share: float = 0.0,
    ) -> None:
        self._background = Background("a comparison of engines failed")
        self.copies = Copies(host, router, clients, watch, self._background.spawn)
        self.counts = Counts()
        self.trust = trust
        self.on_quarantine: Callable[[Address], None] = lambda engine: None
        self._host, self._members, self._router, self._clients = host, members, router, clients
        self._share = share
        self._requests: set[LockstepRequest] = set()
        self._tests: dict[str, asyncio.Future[str]] = {}
        self._paired_at: dict[str, float] = {}
        """The last time at which each model had two comparable engines; entries are kept for `LOCKSTEP_GRACE_S`."""

    # --- requests ---

    def admits(self, request: GenerationRequest, model: str) -> bool:
        """Whether a request runs in lockstep.

        Raises ServiceError if the request asks for lockstep and it is not possible.
        """
        if request.lockstep is False or not (request.lockstep or random.random() < self._share):
            return False
        error = self._obstacle(request, model)
        if error is None:
            self.counts.requests += 1
        elif request.lockstep:
            raise error
        else:
            self.counts.unavailable += 1
        return error is None

    def begin(self, owner: Owner, messages: RequestMessages, spawn: Spawn) -> LockstepRequest:
        """Returns the lockstep state for the sequences of a request, which are not placed yet."""
        required = bool(messages.request.lockstep)
        subjects = (Subject(owner, messages, index, required) for index in range(len(messages.sequences)))
        request = LockstepRequest([LockstepSequence(self, one, spawn) for one in subjects], self._requests.discard)
        self._requests.add(request)
        return request

    def _obstacle(self, request: GenerationRequest, model: str) -> ServiceError | None:
        if request.pooling is not None or request.params.beam is not None:
            message = f"Embeddings and beam searches cannot run in lockstep: send the request without {HEADER}."
            return ServiceError("unsupported_parameter", message, param=HEADER)
        if not with_twins(self._trusted(), model) and not (request.lockstep and self._were_paired(model)):
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
        return self._router.choose_engine(engines, model, num_tokens, (), client=request.client.name)

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
            self.on_quarantine(engine)
            self.copies.on_member_lost(engine)
            self._background.spawn(self._end_engine(engine))

    async def _end_engine(self, engine: Address) -> None:
        await self.self_test(engine, ends=True)

    # --- messages and time ---

    def on_tokens(self, event: TokenEvent, engine: Address) -> bool:
        """Handles tokens of a copy. Returns False if they belong to no copy."""
        return self.copies.on_tokens(event, engine)

    def on_progress(self, marks: Iterable[SequenceMark], missing: Iterable[SequenceRef], engine: Address) -> None:
        """Handles an engine's report of the progress of copies."""
        for mark in marks:
            self.copies.on_mark(mark, engine)
        for ref in missing:
            self.copies.on_missing(ref, engine)

    def on_self_test(self, reply: SelfTestReply) -> None:
        """Handles an engine's answer to a self-test request."""
        answer = self._tests.get(reply.test_id)
        if answer is not None and not answer.done():
            answer.set_result(reply.fault)

    def tick(self) -> None:
        """Tries again to place copies for which no engine had credit. Notes which models have comparable engines."""
        trusted, now = self._trusted(), self.now()
        models = {engine.status.model for engine in trusted if isinstance(engine.status, EngineStatus)}
        recent = {model: at for model, at in self._paired_at.items() if now - at <= limits.LOCKSTEP_GRACE_S}
        self._paired_at = recent | {model: now for model in models if with_twins(trusted, model)}
        for request in list(self._requests):
            request.advance()

    def now(self) -> float:
        """Returns the monotonic time in seconds."""
        return self._host.clock.monotonic()

    def _trusted(self) -> Sequence[Heartbeat]:
        return self.trust.trusted(self._members.alive("engine", self.now()))
