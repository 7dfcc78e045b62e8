"""The request actor: runs one generation request, which ends exactly once.

`preparation` has the prompts tokenized and queues the sequences for placement (`dispatcher`). The request actor then
applies text events, repairs lost streams and placements, and has engines and detokenizers release ended sequences
(`places`). The state machine of a sequence is `SequenceState`; this module performs its effects. The gateway's actor
passes events and ticks to the request actor; the HTTP edge reads its updates.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from services.gateway.path.deliveries import Outlet
from services.gateway.path.gateway_parts import GatewayParts
from services.gateway.path.generation import (
    GenerationRequest,
    ModelCard,
    RequestTimes,
    SequenceUpdate,
    Take,
    TokenCounts,
)
from services.gateway.path.messages import Prompt, RequestMessages
from services.gateway.path.placement.candidate import Candidate, Failure, candidates_of
from services.gateway.path.requests.places import Places
from services.gateway.path.requests.repairs import Repairs
from services.gateway.path.sequence_state import Address, ApplyResult, Delta, Phase, SequenceState
from shared import limits
from shared.codec import unpack_ids
from shared.errors import CODES, ServiceError
from shared.messages import SequenceMark, TextEvent, TokenEvent

MOVED = "moved"
"""Reason in the request's record for leaving a draining engine."""


class RequestActor:
    """One request. Implements `Generation` and `candidate.PlacementClient`. Calls `on_end` once, at the end."""

    def __init__(
        self,
        parts: GatewayParts,
        request: GenerationRequest,
        card: ModelCard,
        number: int,
        on_end: Callable[[], None],
        *,
        with_guests: bool = True,
    ) -> None:
        self.request = request
        self.card = card
        self.sequences: list[SequenceState] = []
        self.prompts: list[Prompt] = []
        self.error: ServiceError | None = None
        self._parts, self._clients = parts, parts.clients
        self._places = Places(parts, card.served_by)
        self._num_expected = 0
        """Number of its sequences that the dispatcher expects (`Dispatcher.expect`), because the prompts are being
        prepared.
        """
        self._number, self._on_end = number, on_end
        self._record = request.origin.record
        self._started_at = self._now()
        self._tokenized_at: float | None = None
        self._candidates: list[Candidate] = []
        self._outlet = Outlet(parts.deliveries)
        self._left = 0
        self._over = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self._repairs = Repairs(parts, self._places)
        self.guests = parts.guests.joining(request, card, self) if with_guests else ()

    # --- Generation ---

    @property
    def num_prompt_tokens(self) -> int:
        """See Generation."""
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        """See Generation."""
        return [unpack_ids(prompt.packed) for prompt in self.prompts]

    @property
    def times(self) -> RequestTimes:
        """See Generation."""
        placed_at = min((one.placed_at for one in self.sequences if one.placed_at is not None), default=None)
        return RequestTimes(self._since_start(self._tokenized_at), self._since_start(placed_at))

    @property
    def token_counts(self) -> TokenCounts:
        """See Generation."""
        num_sequences, cached, prefilled = self.request.num_sequences, 0, 0
        for index, prompt in enumerate(self.prompts):
            choices = self.sequences[index * num_sequences : (index + 1) * num_sequences]
            # The choice with the fewest cached tokens has computed the prompt; the others found its blocks in the
            # cache.
            cached += min((choice.num_cached_tokens for choice in choices if choice.prefills), default=0)
            # All choices of a beam search report the work of its one prefill.
            prefilling = choices if self.request.params.beam is None else choices[:1]
            prefilled += sum(choice.num_prefilled_tokens(prompt.num_tokens) for choice in prefilling)
        generated = sum(len(one.token_ids) - len(self.request.guests.begun) for one in self.sequences)
        if self.sequences and self.request.guests.resumed is not None:
            generated -= self.request.guests.resumed.num_tokens
        return TokenCounts(self.num_prompt_tokens, cached, prefilled + generated, generated)

    @property
    def prompt_tail(self) -> str:
        """See Generation."""
        return self.prompts[0].tail if self.prompts else ""

    @property
    def outputs(self) -> Sequence[SequenceState]:
        """See Generation."""
        return self.sequences

    def updates(self) -> AsyncIterator[list[SequenceUpdate]]:
        """See Generation."""
        return self._outlet.batches()

    def deliver_to(self, take: Take) -> None:
        """See Generation."""
        self._outlet.deliver_to(take)

    async def cancel(self, reason: str, cause: str = "") -> None:
        """See Generation."""
        if not self._over:
            self._finish(ServiceError("client_closed_request", f"The request was cancelled: {reason}."))
            await self._places.tell_release_all(self._leave(), reason)

    # --- the gateway's actor calls these ---

    @property
    def over(self) -> bool:
        """Whether the request has ended, with or without an error."""
        return self._over

    def start(self, preparation: Coroutine[Any, Any, None]) -> None:
        """Starts the request: runs its preparation as a task. If it raises ServiceError, the request ends."""
        if timeout_s := self.request.timeout_s:
            late = ServiceError("deadline_exceeded", f"The request did not end within its timeout of {timeout_s:g} s.")
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self.fail, late)
        if not self.request.guests.idle_s:
            self._expect(self.request.inputs.num_prompts * self.request.num_sequences)
        self.spawn(preparation)

    def _expect(self, count: int) -> None:
        self._parts.dispatcher.expect(self.card.served_by, count - self._num_expected)
        self._num_expected = count

    def on_text(self, index: int, event: TextEvent, engine: Address) -> None:
        """Applies a text event to sequence `index`, unless a guest takes it.

        The caller must call `Dispatcher.pump` afterwards.
        """
        if not any(guest.on_text(index, event, engine) for guest in self.guests):
            self.apply_text(index, event, engine)
        elif self._is_held(index):
            self._parts.watch.touch(engine, self.sequences[index].sequence_id, self._now())

    def _is_held(self, index: int) -> bool:
        return any(guest.holds(index) for guest in self.guests)

    def apply_text(self, index: int, event: TextEvent, engine: Address) -> None:
        """See Running."""
        sequence, now = self.sequences[index], self._now()
        result, delta = sequence.apply_event(event, engine, now)
        if result is ApplyResult.GAP:
            self._repairs.begin(self, index)
        elif result is ApplyResult.DIVERGED:
            self.fail(_contradiction(sequence, engine))
        elif delta is not None:
            if delta.token_ids:
                self._places.release_prefill(sequence, self.spawn)
                self._parts.router.record_output(engine, sequence.sequence_id)
            if sequence.phase is Phase.RUNNING:
                self._parts.watch.touch(engine, sequence.sequence_id, now)
            if event.finish_reason == "error":
                self.fail(_engine_error(event))
                return
            self._emit(index, sequence, event, delta)

    def has_stream(self, index: int, detokenizer: Address) -> bool:
        """Whether the text of sequence `index` may come from this detokenizer."""
        return self.sequences[index].detokenizer == detokenizer or index in self._repairs.running

    def on_vector(self, index: int, event: TokenEvent, engine: Address) -> None:
        """Applies the event of pooling sequence `index`. The caller must call `Dispatcher.pump` afterwards."""
        sequence = self.sequences[index]
        if not sequence.apply_vector(event, engine, self._now()):
            return
        if event.finish_reason == "error":
            self.fail(_engine_error(event))
            return
        self._push(
            sequence,
            SequenceUpdate(
                index=index,
                text="",
                finish_reason=event.finish_reason,
                num_cached_tokens=sequence.num_cached_tokens,
                vector=event.vector,
            ),
        )

    def on_mark(self, index: int, mark: SequenceMark, engine: Address) -> None:
        """Handles the engine's report of the progress of sequence `index`."""
        sequence = self.sequences[index]
        if self._is_held(index):
            return  # the text is here
        if sequence.engine == engine:
            self._repairs.on_mark(self, index, mark)

    def on_missing(self, index: int, attempt: int, engine: Address) -> None:
        """Queues sequence `index` again, because its engine does not have it.

        The caller must call `Dispatcher.pump`.
        """
        sequence = self.sequences[index]
        if sequence.phase is Phase.RUNNING and (sequence.attempt, sequence.engine) == (attempt, engine):
            self.place_again(index)

    def on_lost(self, member: Address) -> None:
        """Queues the sequences of a lost engine again, or rebuilds the streams of a lost detokenizer.

        The caller must call `Dispatcher.pump` afterwards.
        """
        for index, sequence in enumerate(self.sequences):
            if sequence.prefill is not None and sequence.prefill.engine == member:
                sequence.prefill = None  # the engine that waits for the KV notices it and computes the prompt
            if sequence.phase is Phase.RUNNING and sequence.engine == member:
                if self._parts.members.is_silent("engine", *member):
                    # If it goes on, it need not compute for nobody, and it still has the KV in its cache.
                    self._candidates[index].returns_to(member)
                    self.place_again(index, release="the engine stopped responding")
                else:
                    self.place_again(index)
            elif sequence.phase is Phase.RUNNING and sequence.detokenizer == member:
                self._repairs.begin(self, index)

    def on_stalled(self, engine: Address) -> None:
        """Moves the running sequences away from an engine whose step hangs, and tells the engine to drop them.

        The caller must call `Dispatcher.pump` afterwards.
        """
        for index, sequence in enumerate(self.sequences):
            if sequence.prefill is not None and sequence.prefill.engine == engine:
                self._places.release_prefill(sequence, self.spawn)
            if sequence.phase is Phase.RUNNING and sequence.engine == engine:
                self.place_again(index, release="the engine stands still")

    def on_draining(self, member: Address, room: int) -> int:
        """Moves up to `room` running sequences away from a draining engine, or streams from a draining detokenizer.

        Returns how many sequences have left the engine. Beam searches and pooling sequences stay, because they would
        have to begin again; so do requests that only this engine may run. The caller must call `Dispatcher.pump`
        afterwards.
        """
        moved = 0
        request = self.request
        stays = request.params.beam is not None or request.pooling is not None or bool(request.guests.engine)
        for index, sequence in enumerate(self.sequences):
            if sequence.phase is not Phase.RUNNING:
                continue
            if sequence.engine == member and not stays and moved < room:
                moved += self.place_again(index, release=MOVED, planned=True)
            elif sequence.detokenizer == member and self._places.detokenizer_for(sequence, {member}) is not None:
                self._repairs.begin(self, index, {member})
        return moved

    def owns(self, index: int, attempt: int, member: Address) -> bool:
        """Whether an engine or a detokenizer has to keep sequence `index` at this attempt."""
        sequence = self.sequences[index]
        if sequence.phase not in (Phase.PLACING, Phase.RUNNING) or sequence.attempt != attempt:
            return False
        prefill = sequence.prefill.engine if sequence.prefill is not None else None
        return member in (sequence.engine, sequence.detokenizer, prefill) or index in self._repairs.running

    def tick(self, now: float) -> None:
        """Repairs streams, see `Repairs`."""
        self._repairs.tick(self, now)

    def resumed(self, now: float) -> None:
        """Restarts all silence timers, after this gateway's own connection to the bus was down."""
        for sequence in self.sequences:
            sequence.touch(now)

    def fail(self, error: ServiceError) -> None:
        """Ends the request with an error. Does nothing if the request has already ended."""
        if not self._over:
            self._finish(error)
            self.spawn(self._places.tell_release_all(self._leave(), error.code))

    # --- placing ---

    def tokenized(self, messages: RequestMessages) -> list[Candidate]:
        """Receives the tokenized prompts. Returns the sequences to be queued; none if the request has ended."""
        self._expect(0)
        self.prompts = messages.prompts
        self._tokenized_at = self._now()
        self._record.tokenized(self.num_prompt_tokens)
        if self._over:
            return []
        self.messages = messages
        self.sequences = messages.sequences
        self._left = len(self.sequences)
        self._candidates = candidates_of(self, messages, self._number, self.guests)
        for guest in self.guests:
            guest.tokenized(messages)
        return self._candidates

    def prefer(self, index: int, engine: Address) -> None:
        """See Running."""
        self._candidates[index].preferred = engine

    def on_placed(self, index: int, open_failure: Failure | None) -> None:
        """See PlacementClient."""
        sequence, now = self.sequences[index], self._now()
        if self._over:
            return
        sequence.accepted(now)
        for guest in self.guests:
            guest.placed()
        self._record.accepted(index, sequence.attempt)
        if isinstance(open_failure, ServiceError):
            self.fail(open_failure)
        elif sequence.phase is Phase.RUNNING:
            assert sequence.engine is not None
            self._parts.watch.touch(sequence.engine, sequence.sequence_id, now)
            self._parts.moves.placed(sequence.sequence_id, sequence.engine.id)
            if open_failure is not None:
                assert sequence.detokenizer is not None
                self._repairs.begin(self, index, {sequence.detokenizer})

    def on_unplaced(self, index: int, engine: Address, detokenizer: Address | None, attempt: int) -> None:
        """See PlacementClient."""
        sequence = self.sequences[index]
        if self._over or sequence.phase is not Phase.PLACING:
            return
        sequence.unplaced()
        self._record.lost(index, attempt, "not accepted")
        self._places.forget(sequence, engine, detokenizer, self.spawn)
        self.spawn(self._places.tell_release(sequence.sequence_id, attempt, engine, detokenizer, "no place"))
        self._parts.dispatcher.requeue(self._candidates[index])

    def place_again(self, index: int, release: str = "", *, planned: bool = False) -> bool:
        """Queues a running sequence for a new placement. Returns whether that was possible now.

        `release`: the reason of the `Cancel` to the engine; empty if the engine is gone or does not hold the sequence.
        `planned`: the engine is not lost but draining, so this does not count as a loss.
        """
        sequence = self.sequences[index]
        engine, detokenizer, attempt = sequence.engine, sequence.detokenizer, sequence.attempt
        if self._over or index in self._repairs.running or engine is None:
            return False
        if planned:
            sequence.taken_away()
            self._parts.moves.left(sequence.sequence_id, engine.id, len(sequence.token_ids))
        else:
            sequence.lost()
        self._record.lost(index, attempt, release or "the engine stopped responding")
        self._repairs.drop(index)
        self._places.forget(sequence, engine, detokenizer, self.spawn)
        told = engine if release else None
        self.spawn(self._places.tell_release(sequence.sequence_id, attempt, told, detokenizer, release))
        self._parts.dispatcher.requeue(self._candidates[index])
        return True

    # --- the end ---

    def _leave(self) -> list[SequenceState]:
        """Removes all sequences from the queue, and the placements of unfinished ones from the records.

        Returns the sequences that their engine and detokenizer must drop: unfinished ones and those that failed.
        """
        unfinished = [s for s in self.sequences if s.phase is not Phase.DONE or s.finish_reason == "error"]
        for candidate in self._candidates:
            self._parts.dispatcher.withdraw(candidate)
            if candidate.sequence.attempt and candidate.sequence.phase is not Phase.DONE:
                self._parts.dispatcher.ended(candidate)
        for sequence in unfinished:
            self._places.forget(sequence, sequence.engine, sequence.detokenizer, self.spawn)
        self._close_candidates()
        self._parts.dispatcher.pump()
        return unfinished

    def _close_candidates(self) -> None:
        """Drops the candidates of a request that has ended. Breaks reference cycles.

        Without that, the objects of each request would wait for the garbage collector.
        """
        candidates, self._candidates = self._candidates, []
        for candidate in candidates:
            candidate.close()

    def _emit(self, index: int, sequence: SequenceState, event: TextEvent, delta: Delta) -> None:
        self._push(
            sequence,
            SequenceUpdate(
                index=index, text=delta.text, token_ids=delta.token_ids, logprobs=delta.logprobs,
                text_offset=delta.text_offset, finish_reason=event.finish_reason, stop_reason=event.stop_reason,
                num_cached_tokens=sequence.num_cached_tokens, cumulative_logprob=sequence.cumulative_logprob,
                prompt_logprobs=delta.prompt_logprobs,
            ),
        )  # fmt: skip

    def _push(self, sequence: SequenceState, update: SequenceUpdate) -> None:
        self._outlet.put(update)
        if update.token_ids:
            self._record.arrived(update.index, len(update.token_ids))
        if update.finish_reason is not None:
            self._left -= 1
            self._places.forget(sequence, sequence.engine, sequence.detokenizer, self.spawn)
            self._parts.dispatcher.ended(self._candidates[update.index])
            self.spawn(self._places.tell_done(sequence))
        if self._left == 0:
            self._finish(None)
            self._close_candidates()
        elif len(self._outlet) > limits.SLOW_CLIENT_EVENTS_MAX:
            self.fail(ServiceError("timeout", "The client reads too slowly."))

    def _finish(self, error: ServiceError | None) -> None:
        assert not self._over
        self._over, self.error = True, error
        self._expect(0)
        for guest in self.guests:
            guest.ended()
        self.guests = ()  # breaks reference cycles
        if self._deadline is not None:
            self._deadline.cancel()
        self._outlet.end(error)
        on_end, self._on_end = self._on_end, _nothing
        on_end()

    def spawn(self, work: Coroutine[Any, Any, None], repaired: int | None = None) -> None:
        """See Running. `repaired`: index of the sequence whose stream the work repairs."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._reap(done, repaired))

    def _reap(self, task: "asyncio.Task[None]", repaired: int | None) -> None:
        self._tasks.discard(task)
        if repaired is not None:
            self._repairs.running.discard(repaired)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, ServiceError):
            task.get_loop().call_exception_handler({"message": "a request failed", "exception": error, "task": task})
            error = ServiceError("internal_error", "The request could not be processed.")
        self.fail(error)

    def _now(self) -> float:
        return self._parts.host.clock.monotonic()

    def _since_start(self, at: float | None) -> float | None:
        return None if at is None else at - self._started_at


def _nothing() -> None:
    """Does nothing: a request ends once."""


def _contradiction(sequence: SequenceState, engine: Address) -> ServiceError:
    """The error for text that contradicts what the client has: its sender says so, whether or not the engine did."""
    sender = sequence.detokenizer.id if sequence.detokenizer is not None else "?"
    message = f"The detokenizer {sender} sent text of the engine {engine.id} that contradicts the text before it."
    return ServiceError("internal_error", message)


def _engine_error(event: TextEvent | TokenEvent) -> ServiceError:
    code = event.error_code if event.error_code in CODES else "engine_failure"
    return ServiceError(code, event.error_message or "The engine could not go on with this request.")
