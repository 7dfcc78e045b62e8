"""Runs copies of sequences on chosen engines.

The engines send the tokens directly to the gateway, not to a detokenizer.

A copy has an id of its own, and attempt 1: a lost copy is replaced by a new one with another id. It uses credit like
any other sequence. Its tokens are neither counted in a request's usage nor sent to the client.
"""

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from antiphon.services.gateway.path.liveness.progress_watch import ProgressWatch
from antiphon.services.gateway.path.messages import RequestMessages
from antiphon.services.gateway.path.router import Router
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.services.gateway.path.service_clients import PeerUnavailableError, ServiceClients
from antiphon.shared.actors.host import Host
from antiphon.shared.codec import encode, pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    EngineStatus,
    Heartbeat,
    SequenceMark,
    SequenceRef,
    Submit,
    SubmitBatch,
    TokenEvent,
)

log = logging.getLogger(__name__)
ATTEMPT = 1
MARK = "~"
"""Separates the request's id from the number of the copy in the copy's id."""


@dataclass(eq=False, slots=True, kw_only=True)
class Copy:
    """One copy that was sent to an engine. `on_tokens` gets its events, `on_lost` is called if the engine loses it."""

    name: str
    engine: Address
    on_tokens: Callable[["Copy", TokenEvent], None]
    on_lost: Callable[["Copy"], None]
    num_tokens: int
    """Number of output tokens so far, including those with which the copy began."""
    ended: bool = False
    gone: bool = False
    """Whether the copy was given up or lost; its further events are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a copy computes: sequence `index` of a request, with `token_ids` as its output so far.

    `only_next`: only the next token is computed, without using the engine's prefix cache.
    """

    messages: RequestMessages
    index: int
    token_ids: list[int]
    salt: bytes = b""
    only_next: bool = False


@dataclass(slots=True, kw_only=True)
class Copies:
    """The copies of a gateway, by id."""

    host: Host
    router: Router
    clients: ServiceClients
    watch: ProgressWatch
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Runs a coroutine that sends a message."""
    running: dict[str, Copy] = field(default_factory=dict[str, Copy])
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def reserve(
        self,
        engine: Heartbeat,
        draft: Draft,
        on_tokens: Callable[[Copy, TokenEvent], None],
        on_lost: Callable[[Copy], None],
    ) -> tuple[Copy, Submit]:
        """Makes a copy and takes credit of the engine for it. The sequence must be placed. `send` starts the copy."""
        assert isinstance(engine.status, EngineStatus)
        request = draft.messages.request
        name = f"{request.request_id}{MARK}{next(self._numbers)}"
        address = Address(engine.id, engine.instance_id)
        copy = Copy(name=name, engine=address, on_tokens=on_tokens, on_lost=on_lost, num_tokens=len(draft.token_ids))
        num_tokens = draft.messages.prompt(draft.index).num_tokens + len(draft.token_ids)
        self.router.record_dispatch(engine, name, num_tokens, (), request.origin.client.name)
        self.running[name] = copy
        return copy, draft.messages.submit_copy(
            draft.index, name, ATTEMPT, pack_ids(draft.token_ids), salt=draft.salt, only_next=draft.only_next
        )

    async def send(self, copy: Copy, submit: Submit) -> None:
        """Sends a copy to its engine. If the engine does not accept it, `on_lost` is called."""
        try:
            reply = (await self.clients.submit_batch(copy.engine, encode(SubmitBatch((submit,))))).replies[0]
        except PeerUnavailableError:
            self.router.record_silence(copy.engine, copy.name)
            self.lose(copy)
            return
        except ServiceError as error:
            log.warning("the engine %s refused the copy %s: %s", copy.engine.id, copy.name, error)
            self.router.record_answer(copy.engine, copy.name, accepted=True)
            self.lose(copy)
            return
        accepted = reply.status in ("accepted", "duplicate")
        self.router.record_answer(copy.engine, copy.name, accepted=accepted)
        if copy.gone:
            await self.clients.cancel(copy.engine, copy.name, ATTEMPT, "not needed")
        elif not accepted:
            self.lose(copy)
        elif not copy.ended:
            self.watch.touch(copy.engine, copy.name, self.host.clock.monotonic())

    async def give_up(self, copy: Copy) -> None:
        """Ends a copy that is no longer needed, and tells its engine. Idempotent."""
        if not copy.gone:
            self._forget(copy)
            await self.clients.cancel(copy.engine, copy.name, ATTEMPT, "not needed")

    def lose(self, copy: Copy) -> None:
        """Records that the engine does not run a copy, and notifies the copy's owner."""
        if not copy.gone:
            had_ended = copy.ended
            self._forget(copy)
            if not had_ended:
                copy.on_lost(copy)

    # --- messages ---

    def on_tokens(self, event: TokenEvent, engine: Address) -> bool:
        """Adds tokens of a copy; if earlier tokens are missing, requests them.

        Returns False if there is no such copy.
        """
        copy = self.running.get(event.sequence_id)
        if copy is None:
            return False
        if copy.engine != engine or copy.ended:
            return True
        if event.position > copy.num_tokens:
            self.spawn(self.clients.resend(engine, copy.name, ATTEMPT, copy.num_tokens))
        elif event.finish_reason == "error":
            log.warning("the copy %s failed on %s: %s", copy.name, engine.id, event.error_message)
            self.lose(copy)
        else:
            self._take(copy, event)
        return True

    def _take(self, copy: Copy, event: TokenEvent) -> None:
        copy.num_tokens = max(copy.num_tokens, event.position + len(event.token_ids))
        if event.finish_reason is not None:
            self._end(copy)
            self.spawn(self.clients.done(copy.engine, copy.name, ATTEMPT))
        else:
            self.watch.touch(copy.engine, copy.name, self.host.clock.monotonic())
        copy.on_tokens(copy, event)

    def on_mark(self, mark: SequenceMark, engine: Address) -> None:
        """Requests tokens that the engine has generated and that have not arrived."""
        copy = self.running.get(mark.sequence_id)
        if copy is None or copy.engine != engine or copy.ended:
            return
        if mark.num_output_tokens > copy.num_tokens or mark.finished:
            self.spawn(self.clients.resend(engine, copy.name, ATTEMPT, copy.num_tokens))

    def on_missing(self, ref: SequenceRef, engine: Address) -> None:
        """Handles the engine's report that it does not have a copy."""
        copy = self.running.get(ref.sequence_id)
        if copy is not None and copy.engine == engine and not copy.ended:
            self.lose(copy)

    def on_member_lost(self, member: Address) -> None:
        """Gives up the copies on an engine that is lost, or gets no more work."""
        for copy in [one for one in self.running.values() if one.engine == member]:
            self.lose(copy)

    def owns(self, ref: SequenceRef, member: Address) -> bool:
        """Whether an engine has to keep a copy."""
        copy = self.running.get(ref.sequence_id)
        return copy is not None and copy.engine == member and not copy.ended

    def ref(self, name: str) -> SequenceRef | None:
        """Returns the reference of a running copy for a query; None if no copy has this name."""
        copy = self.running.get(name)
        return None if copy is None or copy.ended else SequenceRef(name, ATTEMPT)

    def _end(self, copy: Copy) -> None:
        """Records that the engine has nothing more to compute for this copy."""
        copy.ended = True
        self.watch.drop(copy.engine, copy.name)
        self.router.record_end(copy.engine, copy.name)

    def _forget(self, copy: Copy) -> None:
        copy.gone = True
        self.running.pop(copy.name, None)
        self._end(copy)
