"""The request actor: runs one generation request, which ends exactly once.

`preparation` has the prompts tokenized and queues the sequences for placement (`dispatcher`). The request actor then
applies text events; `placements` has sequences placed again whose members are lost, and released when they have ended.
The state machine of a sequence is `SequenceState`. The gateway's actor passes events to the request actor; the HTTP
edge reads its updates.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from antiphon.services.gateway.path.gateway_parts import GatewayParts
from antiphon.services.gateway.path.generation import (
    GenerationRequest,
    ModelCard,
    RequestTimes,
    SequenceUpdate,
    TokenCounts,
)
from antiphon.services.gateway.path.messages import Prompt, RequestMessages
from antiphon.services.gateway.path.outlet import Outlet
from antiphon.services.gateway.path.placement.candidate import Candidate
from antiphon.services.gateway.path.requests.placements import Placements, tell_release_all
from antiphon.services.gateway.path.sequence_state import Address, ApplyResult, SequenceState
from antiphon.shared import limits
from antiphon.shared.codec import unpack_ids
from antiphon.shared.errors import CODES, ServiceError
from antiphon.shared.messages import TextEvent, TokenEvent


class RequestActor:
    """One request. Implements `Generation`. Calls `on_end` once, at the end."""

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
        self.num_prompt_tokens = 0
        """See Generation."""
        self.error: ServiceError | None = None
        self._parts = parts
        self.placements = Placements(parts, self)
        self._num_expected = 0
        """Number of its sequences that the dispatcher expects (`QueueWaits.expected`), because the prompts are being
        prepared.
        """
        self._number, self._on_end = number, on_end
        self._record = request.origin.record
        self._now = parts.host.clock.monotonic
        self._started_at = self._now()
        self._tokenized_at: float | None = None
        self._outlet = Outlet(self._record)
        self._left = 0
        self.over = False
        """Whether the request has ended, with or without an error."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self.guests = parts.guests.joining(request, card, self) if with_guests else ()

    # --- Generation ---

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        """See Generation."""
        return [unpack_ids(prompt.packed) for prompt in self.prompts]

    @property
    def times(self) -> RequestTimes:
        """See Generation."""
        placed_at = min((one.placed_at for one in self.sequences if one.placed_at is not None), default=None)
        ends = [None if at is None else at - self._started_at for at in (self._tokenized_at, placed_at)]
        return RequestTimes(*ends)

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

    async def cancel(self, reason: str, cause: str = "") -> None:
        """See Generation."""
        if not self.over:
            self._finish(ServiceError("client_closed_request", f"The request was cancelled: {reason}."))
            await tell_release_all(self._parts.clients, self.placements.leave(), reason)

    # --- the gateway's actor calls these ---

    def start(self, preparation: Coroutine[Any, Any, None], count: int) -> None:
        """Starts the request: runs its preparation as a task. If it raises ServiceError, the request ends.

        `count`: number of its sequences.
        """
        if timeout_s := self.request.timeout_s:
            late = ServiceError("deadline_exceeded", f"The request did not end within its timeout of {timeout_s:g} s.")
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self.fail, late)
        if not self.request.guests.idle_s:
            self._expect(count)
        self.spawn(preparation)

    def _expect(self, count: int) -> None:
        self._parts.dispatcher.waits.expected[self.card.served_by] += count - self._num_expected
        self._num_expected = count

    def on_text(self, index: int, event: TextEvent, engine: Address) -> None:
        """Applies a text event to sequence `index`, unless a guest takes it.

        The caller must call `Dispatcher.pump` afterwards.
        """
        if not self.guests or not any(guest.on_text(index, event, engine) for guest in self.guests):
            self.apply_text(index, event, engine)
        elif any(guest.holds(index) for guest in self.guests):
            self._parts.watch.touch(engine, self.sequences[index].sequence_id, self._now())

    def apply_text(self, index: int, event: TextEvent, engine: Address) -> None:
        """See Running."""
        sequence, now = self.sequences[index], self._now()
        result, update = sequence.apply_event(event, engine, now)
        if update is not None:
            self.placements.on_output(sequence, engine, now, has_tokens=bool(update.token_ids))
            if event.finish_reason == "error":
                self.fail(_engine_error(event))
            else:
                self._push(update)
        elif result is ApplyResult.GAP:
            self.placements.repair(index)
        elif result is ApplyResult.DIVERGED:
            self.fail(_contradiction(sequence, engine))

    def on_vector(self, index: int, event: TokenEvent, engine: Address) -> None:
        """Applies the event of pooling sequence `index`. The caller must call `Dispatcher.pump` afterwards."""
        sequence = self.sequences[index]
        if not sequence.apply_vector(event, engine, self._now()):
            return
        if event.finish_reason == "error":
            self.fail(_engine_error(event))
            return
        self._push(
            SequenceUpdate(
                index=index,
                text="",
                finish_reason=event.finish_reason,
                num_cached_tokens=sequence.num_cached_tokens,
                vector=event.vector,
            )
        )

    def resumed(self, now: float) -> None:
        """Restarts all silence timers, after this gateway's own connection to the bus was down."""
        for sequence in self.sequences:
            sequence.touch(now)

    def fail(self, error: ServiceError) -> None:
        """Ends the request with an error. Does nothing if the request has already ended."""
        if not self.over:
            self._finish(error)
            self.spawn(tell_release_all(self._parts.clients, self.placements.leave(), error.code))

    # --- placing ---

    def tokenized(self, messages: RequestMessages, num_tokens: int) -> list[Candidate]:
        """Receives the tokenized prompts. Returns the sequences to be queued; none if the request has ended."""
        self._expect(0)
        self.prompts = messages.prompts
        self.num_prompt_tokens = num_tokens
        self._tokenized_at = self._now()
        self._record.tokenized(self.num_prompt_tokens)
        if self.over:
            return []
        self.messages = messages
        self.sequences = messages.sequences
        self._left = len(self.sequences)
        candidates = self.placements.candidates(messages, self._number, self.guests)
        for guest in self.guests:
            guest.tokenized(messages)
        return candidates

    def prefer(self, index: int, engine: Address) -> None:
        """See Running."""
        self.placements.prefer(index, engine)

    # --- the end ---

    def _push(self, update: SequenceUpdate) -> None:
        num_waiting = self._outlet.put(update)
        if update.token_ids:
            self._record.arrived(update.index, len(update.token_ids))
        if update.finish_reason is not None:
            self._left -= 1
            self.placements.on_end(update.index)
        if self._left == 0:
            self._finish(None)
            self.placements.close()
        elif num_waiting > limits.SLOW_CLIENT_EVENTS_MAX:
            self.fail(ServiceError("timeout", "The client reads too slowly."))

    def _finish(self, error: ServiceError | None) -> None:
        assert not self.over
        self.over, self.error = True, error
        self._expect(0)
        for guest in self.guests:
            guest.ended()
        self.guests = ()  # breaks reference cycles
        if self._deadline is not None:
            self._deadline.cancel()
        self._outlet.end(error)
        on_end, self._on_end = self._on_end, _nothing
        on_end()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """See Running."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, ServiceError):
            task.get_loop().call_exception_handler({"message": "a request failed", "exception": error, "task": task})
            error = ServiceError("internal_error", "The request could not be processed.")
        self.fail(error)


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
