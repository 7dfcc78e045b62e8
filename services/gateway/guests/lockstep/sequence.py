"""One sequence in lockstep: places its copy, passes on text on which both engines agree, and resolves differences.

If an engine dies, the sequence itself is placed again as usual, with the agreed tokens; a lost copy is replaced by a
new one that continues these tokens. If no other engine is left, a sampled request continues without a copy; a request
that asked for lockstep waits for `QUEUE_WAIT_S` and then fails.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from antiphon.services.gateway.guests.lockstep.copies import Copies, Copy, Draft
from antiphon.services.gateway.guests.lockstep.counts import Counts
from antiphon.services.gateway.guests.lockstep.pair import Difference, Pair
from antiphon.services.gateway.guests.lockstep.verdict import Loser, Tokens, by_repetition, by_self_test, by_third
from antiphon.services.gateway.path.guest import Running
from antiphon.services.gateway.path.messages import RequestMessages
from antiphon.services.gateway.path.sequence_state import Address, Phase, SequenceState
from antiphon.shared import limits
from antiphon.shared.blocks import adapter_salt
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import Heartbeat, TextEvent, TokenEvent

log = logging.getLogger(__name__)
COPIES_MAX = 100
"""Maximum number of lost copies of one sequence; then it continues without a copy."""
SALT_BYTES = 16


class Engines(Protocol):
    """The engines that can run copies and decide differences (`coordinator.Lockstep`)."""

    copies: Copies
    counts: Counts

    def now(self) -> float:
        """Returns the monotonic time in seconds."""
        ...

    def twins(self, engine: Address) -> list[Heartbeat] | None:
        """Returns the trusted engines that must compute the same as this one; None if this engine is gone."""
        ...

    def choose(self, engines: Sequence[Heartbeat], draft: Draft) -> Heartbeat | None:
        """Returns the cheapest of the engines with credit; None if none has any."""
        ...

    def another(self, engines: tuple[Address, Address]) -> Heartbeat | None:
        """Returns a third engine that can decide a difference between these two; None if there is none."""
        ...

    def heartbeat(self, engine: Address) -> Heartbeat | None:
        """Returns the last heartbeat of a living engine."""
        ...

    async def self_test(self, engine: Address) -> str | None:
        """Makes an engine test itself. Returns the fault that it found, "" if none; None if it does not answer."""
        ...

    def condemned(self, engine: Address) -> str:
        """Returns the reason for which an engine was found wrong; empty if it was not."""
        ...

    def quarantine(self, engine: Address, reason: str) -> None:
        """Stops sending work to an engine, moves its sequences, and tells it to exit."""
        ...


@dataclass(frozen=True, slots=True)
class Subject:
    """The sequence that is compared: number `index` of `messages`. `required`: whether the client asked for it."""

    owner: Running
    messages: RequestMessages
    index: int
    required: bool

    @property
    def state(self) -> SequenceState:
        """The sequence itself."""
        return self.messages.sequences[self.index]


class LockstepSequence:
    """The pair of a sequence and its copy. Called on the event loop."""

    def __init__(
        self, lockstep: "Engines", subject: Subject, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._all, self._subject, self._spawn = lockstep, subject, spawn
        self._pair = Pair()
        self._copy: Copy | None = None
        self._settling = False
        self._alone = False
        """Whether the sequence continues without a copy."""
        self._over = False
        self._suspected = False
        """Whether a difference is undecided, so that the sequence must not continue without a copy."""
        self._without_twin_since: float | None = None
        self._num_copies = 0

    @property
    def holds(self) -> bool:
        """Whether text is held until the copy catches up. Then a pause does not mean that text was lost."""
        return bool(self._pair.held)

    def on_text(self, event: TextEvent, engine: Address) -> None:
        """Handles a text event of the sequence, and releases text on which both engines agree."""
        state = self._subject.state
        if self._alone or event.attempt != state.attempt or event.finish_reason == "error":
            self._subject.owner.apply_text(self._subject.index, event, engine)
            return
        self._pair.held.append((event, engine))
        self.advance()

    def advance(self) -> None:
        """Releases agreed text, starts to resolve a difference, and replaces a missing copy."""
        state = self._subject.state
        if self._over or self._settling or self._alone:
            return
        before = self._pair.num_compared
        released, difference = self._pair.release(state.attempt)
        self._all.counts.compared_tokens += self._pair.num_compared - before
        self._show(released)
        if difference is not None and state.engine is not None and self._copy is not None:
            self._settling = True
            self._spawn(self._settle(difference, (state.engine, self._copy.engine)))
        elif not self._over:
            self._place_copy()

    def end(self) -> None:
        """Ends the copy, because the request has ended."""
        self._over = True
        if self._copy is not None:
            self._spawn(self._all.copies.give_up(self._copy))
            self._copy = None

    # --- the copy ---

    def _place_copy(self) -> None:
        """Starts a copy if there is none, or if it is on the same engine as the sequence."""
        state, copy = self._subject.state, self._copy
        if state.phase not in (Phase.PLACING, Phase.RUNNING) or state.engine is None:
            return
        if copy is not None and copy.engine == state.engine:
            self._copy = None
            self._spawn(self._all.copies.give_up(copy))
        if self._copy is not None:
            return
        twins = self._all.twins(state.engine)
        if twins is None:
            return  # the sequence's own engine is lost, and the sequence will be placed again
        if not twins or self._num_copies >= COPIES_MAX:
            self._wait_for_twin()
            return
        self._without_twin_since = None
        draft = Draft(messages=self._subject.messages, index=self._subject.index, token_ids=list(state.token_ids))
        engine = self._all.choose(twins, draft)
        if engine is None:
            return  # all are busy; the next tick tries again
        self._num_copies += 1
        self._pair.restart(draft.token_ids)
        self._copy, submit = self._all.copies.reserve(engine, draft, self._on_tokens, self._on_lost)
        self._spawn(self._all.copies.send(self._copy, submit))

    def _on_tokens(self, copy: Copy, event: TokenEvent) -> None:
        if copy is self._copy:
            self._pair.add(event.position, event.token_ids, ended=event.finish_reason is not None)
            self.advance()

    def _on_lost(self, copy: Copy) -> None:
        if copy is self._copy:
            self._copy = None
            self.advance()

    def _wait_for_twin(self) -> None:
        now = self._all.now()
        since = self._without_twin_since = self._without_twin_since or now
        if not self._subject.required and not self._suspected:
            self._go_on_alone()
        elif now - since > limits.QUEUE_WAIT_S:
            message = "No second engine is left to compare this request with: send it again, or without lockstep."
            self._subject.owner.fail(ServiceError("no_engine", message, retry_after_s=2.0))

    def _go_on_alone(self) -> None:
        self._alone = True
        self._all.counts.dropped += 1
        self._show(self._pair.release_all())

    def _show(self, released: list[tuple[TextEvent, Address]]) -> None:
        for event, engine in released:
            if not self._over:
                self._subject.owner.apply_text(self._subject.index, event, engine)

    # --- differences ---

    async def _settle(self, difference: Difference, engines: tuple[Address, Address]) -> None:
        """Determines which engine is wrong and quarantines it; the sequence continues on the other one."""
        state, counts = self._subject.state, self._all.counts
        counts.differences += 1
        log.error(
            "the engines %s and %s differ at token %d of %s: %s and %s",
            engines[0].id, engines[1].id, difference.position, state.sequence_id, *difference.tokens,
        )  # fmt: skip
        for number in range(limits.LOCKSTEP_TRIES):
            loser, reason = await self._loser(difference, engines)
            if loser is not None:
                break
            if self._over or self._start_again(engines):
                return
            if number + 1 < limits.LOCKSTEP_TRIES:
                # A third engine may be busy, its heartbeats may be late, or it may be starting.
                await asyncio.sleep(limits.LOCKSTEP_GRACE_S)
        else:
            counts.undecided += 1
            log.error("it could not be decided which of %s and %s is right", engines[0].id, engines[1].id)
            message = "Two engines computed different tokens, and it is unknown which is right. Send the request again."
            self._subject.owner.fail(ServiceError("engine_failure", message))
            return
        winner = engines[1 - loser]
        if loser == 0:
            self._pair.held.clear()
            self._subject.owner.prefer(self._subject.index, winner)
        else:
            self._copy = None
        self._settling = False
        message = f"its token {difference.position} of {state.sequence_id} was wrong ({reason}; {winner.id} was right)"
        self._all.quarantine(engines[loser], message)
        self.advance()

    def _start_again(self, engines: tuple[Address, Address]) -> bool:
        """If one of the two engines is gone, replaces it instead of deciding the difference.

        Returns whether one of the two is gone.

        The remaining engine may be the wrong one, so its output is held until another engine confirms it.
        """
        gone = tuple(self._all.heartbeat(engine) is None for engine in engines)
        if not any(gone):
            return False
        self._suspected = True
        if gone[0]:
            self._pair.held.clear()
        if gone[1]:
            self._copy = None
        self._settling = False
        self.advance()
        return True

    def _condemned(self, engines: tuple[Address, Address]) -> tuple[Loser, str] | None:
        """Returns which of two engines was found wrong meanwhile by another check, and the reason."""
        found = tuple(self._all.condemned(engine) for engine in engines)
        loser = by_self_test((found[0], found[1]))
        return None if loser is None else (loser, found[loser])

    async def _loser(self, difference: Difference, engines: tuple[Address, Address]) -> tuple[Loser | None, str]:
        tokens, prefix = difference.tokens, self._pair.copied[: difference.position]
        counts = self._all.counts
        if known := self._condemned(engines):
            return known
        third = self._all.another(engines)
        if third is not None:
            counts.count_vote("third")
            vote = await self._next_token(third, prefix)
            if (loser := by_third(tokens, vote)) is not None:
                return loser, f"{third.id} computed {vote}"
        if known := self._condemned(engines):
            return known
        counts.count_vote("repetition")
        again = await self._again(engines, prefix)
        if (loser := by_repetition(tokens, again)) is not None:
            return loser, f"it computed {again[loser]} the second time"
        if known := self._condemned(engines):
            return known
        counts.count_vote("self_test")
        faults = await asyncio.gather(*(self._all.self_test(engine) for engine in engines))
        if (loser := by_self_test((faults[0], faults[1]))) is not None:
            return loser, f"it found that {faults[loser]}"
        return self._condemned(engines) or (None, "")

    async def _again(self, engines: tuple[Address, Address], prefix: list[int]) -> Tokens:
        beats = [self._all.heartbeat(engine) for engine in engines]
        first, second = await asyncio.gather(*(self._next_token(beat, prefix) for beat in beats))
        return first, second

    async def _next_token(self, engine: Heartbeat | None, prefix: list[int]) -> int | None:
        """Makes an engine compute the token after the prefix, without its prefix cache.

        None if it does not answer in time.
        """
        state = self._subject.state
        if engine is None or state.phase not in (Phase.PLACING, Phase.RUNNING):
            return None
        card = self._subject.messages.card
        salt = secrets.token_bytes(SALT_BYTES)
        salt = adapter_salt(salt, card.adapter_version) if card.adapter_version else salt
        answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

        def take(_: Copy, event: TokenEvent) -> None:
            if event.token_ids and not answer.done():
                answer.set_result(event.token_ids[0])

        def lose(_: Copy) -> None:
            if not answer.done():
                answer.set_result(None)

        draft = Draft(
            messages=self._subject.messages, index=self._subject.index, token_ids=prefix, salt=salt, only_next=True
        )
        copy, submit = self._all.copies.reserve(engine, draft, take, lose)
        try:
            async with asyncio.timeout(limits.LOCKSTEP_VOTE_S):
                await self._all.copies.send(copy, submit)
                return await answer
        except TimeoutError:
            return None
        finally:
            await self._all.copies.give_up(copy)
