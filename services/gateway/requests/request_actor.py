"""The request actor: runs one generation request, which ends exactly once.

`preparation` has the prompts tokenized and queues the sequences for placement (`dispatcher`). The request actor then
applies text events, repairs lost streams and placements, and has engines and detokenizers release ended sequences
(`places`). The state machine of a sequence is `SequenceState`; this module performs its effects. The gateway's actor
passes events and ticks to the request actor; the HTTP edge reads its updates.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from msgspec.structs import replace

from services.gateway.generation import GenerationRequest, ModelCard, RequestTimes, SequenceUpdate, Take, TokenCounts
from services.gateway.requests.content import content_of
from services.gateway.requests.gateway_parts import GatewayParts
from services.gateway.requests.lockstep.coordinator import LockstepRequest
from services.gateway.requests.messages import Prompt, RequestMessages
from services.gateway.requests.placement.candidate import Candidate, Failure, candidates_of
from services.gateway.requests.places import Places
from services.gateway.requests.sequence_state import Address, ApplyResult, Delta, Phase, SequenceState
from services.gateway.requests.service_clients import PeerUnavailableError
from shared import limits
from shared.codec import unpack_ids
from shared.errors import CODES, ServiceError
from shared.messages import PictureFile, SequenceMark, TextEvent, TokenEvent
from shared.parameters.sampling import SamplingParams

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
        in_lockstep: bool = False,
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
        self._record = request.record
        self._started_at = self._now()
        self._tokenized_at: float | None = None
        self._candidates: list[Candidate] = []
        self._updates: deque[SequenceUpdate] = deque()
        self._take: Take | None = None
        self._wake = asyncio.Event()
        self._is_waiting = self._is_due = False
        """Whether the consumer waits for the next item of `updates`, and whether a delivery is scheduled."""
        self._failure: Exception | None = None
        """What `_take` has raised."""
        self._left = 0
        self._over = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self.picture_files: list[PictureFile] = []
        """The files of its images, which the gateway stores until the request ends."""
        self._repairing: set[int] = set()
        self._behind: set[int] = set()
        """Indexes of sequences whose engine has tokens that have not arrived."""
        self._in_lockstep = in_lockstep
        self._lockstep: LockstepRequest | None = None
        """Compares the tokens of two engines; None if each sequence runs on only one engine."""
        self._streamless: dict[int, float] = {}
        """Indexes of sequences whose stream no detokenizer accepts, with the time at which this began."""

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
        generated = sum(len(one.token_ids) - len(self.request.begun) for one in self.sequences)
        if self.sequences and self.request.resumed is not None:
            generated -= self.request.resumed.num_tokens
        return TokenCounts(self.num_prompt_tokens, cached, prefilled + generated, generated)

    @property
    def prompt_tail(self) -> str:
        """See Generation."""
        return self.prompts[0].tail if self.prompts else ""

    @property
    def outputs(self) -> Sequence[SequenceState]:
        """See Generation."""
        return self.sequences

    async def updates(self) -> AsyncIterator[list[SequenceUpdate]]:
        """See Generation."""
        while self._failure is None:
            if self._updates:
                batch = list(self._updates)
                self._updates.clear()
                yield batch
                continue
            if self._over:
                break
            self._wake.clear()
            self._is_waiting = True
            try:
                await self._wake.wait()
            finally:
                self._is_waiting = False
        if (error := self._failure or self.error) is not None:
            raise error

    def deliver_to(self, take: Take) -> None:
        """See Generation."""
        self._take = take

    def deliver(self) -> None:
        """Passes the new updates to the consumer: to its function, or if that does not take them, in its task."""
        self._is_due = False
        if self._take is not None and self._is_waiting and self._updates and self._failure is None:
            try:
                taken = self._take(list(self._updates))
            except Exception as error:
                self._failure, taken = error, False
            if taken:
                self._updates.clear()
                return
        self._wake.set()

    async def cancel(self, reason: str, cause: str = "") -> None:
        """See Generation."""
        if not self._over:
            self._finish(ServiceError("client_closed_request", f"The request was cancelled: {reason}."))
            await self._places.tell_release_all(self._leave(), reason)

    @property
    def sent_params(self) -> SamplingParams:
        """The parameters as they were sent to engines. Valid when `num_prompt_tokens` is."""
        return self._messages.request.params

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
        if not self.request.idle_s:
            self._expect(self.request.num_prompts * self.request.num_sequences)
        self._spawn(preparation)

    def _expect(self, count: int) -> None:
        self._parts.dispatcher.expect(self.card.served_by, count - self._num_expected)
        self._num_expected = count

    def on_text(self, index: int, event: TextEvent, engine: Address) -> None:
        """Applies a text event to sequence `index`; in lockstep, only after a second engine has the same tokens.

        The caller must call `Dispatcher.pump` afterwards.
        """
        if self._lockstep is None:
            self.apply_text(index, event, engine)
            return
        self._lockstep.on_text(index, event, engine)
        if self._lockstep.holds(index):
            self._parts.watch.touch(engine, self.sequences[index].sequence_id, self._now())

    def apply_text(self, index: int, event: TextEvent, engine: Address) -> None:
        """Applies a text event to sequence `index` now."""
        sequence, now = self.sequences[index], self._now()
        result, delta = sequence.apply_event(event, engine, now)
        if result is ApplyResult.GAP:
            self._repair(index)
        elif result is ApplyResult.DIVERGED:
            self.fail(ServiceError("engine_failure", "The engine contradicted its own output."))
        elif delta is not None:
            if delta.token_ids:
                self._places.release_prefill(sequence, self._spawn)
                self._parts.router.record_output(engine, sequence.sequence_id)
            if sequence.phase is Phase.RUNNING:
                self._parts.watch.touch(engine, sequence.sequence_id, now)
            if event.finish_reason == "error":
                self.fail(_engine_error(event))
                return
            self._emit(index, sequence, event, delta)

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
                index,
                "",
                finish_reason=event.finish_reason,
                num_cached_tokens=sequence.num_cached_tokens,
                vector=event.vector,
            ),
        )

    def on_mark(self, index: int, mark: SequenceMark, engine: Address) -> None:
        """Handles the engine's report of the progress of sequence `index`."""
        sequence = self.sequences[index]
        if self._lockstep is not None and self._lockstep.holds(index):
            return  # the text is here, and waits for the second engine
        if sequence.engine == engine and sequence.report_progress(mark, self._now()):
            self._behind.add(index)

    def on_missing(self, index: int, attempt: int, engine: Address) -> None:
        """Queues sequence `index` again, because its engine does not have it.

        The caller must call `Dispatcher.pump`.
        """
        sequence = self.sequences[index]
        if sequence.phase is Phase.RUNNING and (sequence.attempt, sequence.engine) == (attempt, engine):
            self._place_again(index)

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
                    self._place_again(index, release="the engine stopped responding")
                else:
                    self._place_again(index)
            elif sequence.phase is Phase.RUNNING and sequence.detokenizer == member:
                self._repair(index)

    def on_stalled(self, engine: Address) -> None:
        """Moves the running sequences away from an engine whose step hangs, and tells the engine to drop them.

        The caller must call `Dispatcher.pump` afterwards.
        """
        for index, sequence in enumerate(self.sequences):
            if sequence.prefill is not None and sequence.prefill.engine == engine:
                self._places.release_prefill(sequence, self._spawn)
            if sequence.phase is Phase.RUNNING and sequence.engine == engine:
                self._place_again(index, release="the engine stands still")

    def on_draining(self, member: Address, room: int) -> int:
        """Moves up to `room` running sequences away from a draining engine, or streams from a draining detokenizer.

        Returns how many sequences have left the engine. Beam searches and pooling sequences stay, because they would
        have to begin again; so do requests that only this engine may run. The caller must call `Dispatcher.pump`
        afterwards.
        """
        moved = 0
        stays = self.request.params.beam is not None or self.request.pooling is not None or bool(self.request.engine)
        for index, sequence in enumerate(self.sequences):
            if sequence.phase is not Phase.RUNNING:
                continue
            if sequence.engine == member and not stays and moved < room:
                moved += self._place_again(index, release=MOVED, planned=True)
            elif sequence.detokenizer == member and self._places.detokenizer_for(sequence, {member}) is not None:
                self._repair(index, {member})
        return moved

    def owns(self, index: int, attempt: int, member: Address) -> bool:
        """Whether an engine or a detokenizer has to keep sequence `index` at this attempt."""
        sequence = self.sequences[index]
        if sequence.phase not in (Phase.PLACING, Phase.RUNNING) or sequence.attempt != attempt:
            return False
        prefill = sequence.prefill.engine if sequence.prefill is not None else None
        return member in (sequence.engine, sequence.detokenizer, prefill) or index in self._repairing

    def tick(self, now: float) -> None:
        """Rebuilds streams whose tokens do not arrive, and streams for which there was no detokenizer before."""
        if not self._behind and not self._streamless:
            return
        for index in [i for i in self._behind if self.sequences[i].behind_since is None]:
            self._behind.discard(index)
        for index in [i for i in self._behind if self.sequences[i].stalled(now)]:
            self._behind.discard(index)
            self._repair(index)
        for index, since in list(self._streamless.items()):
            if now - since > limits.QUEUE_WAIT_S:
                message = f"No detokenizer of the model {self.card.served_by!r} is running. Try again shortly."
                self.fail(ServiceError("no_detokenizer", message, retry_after_s=2.0))
                return
            self._repair(index)

    def resumed(self, now: float) -> None:
        """Restarts all silence timers, after this gateway's own connection to the bus was down."""
        for sequence in self.sequences:
            sequence.touch(now)

    def fail(self, error: ServiceError) -> None:
        """Ends the request with an error. Does nothing if the request has already ended."""
        if not self._over:
            self._finish(error)
            self._spawn(self._places.tell_release_all(self._leave(), error.code))

    # --- placing ---

    def tokenized(self, messages: RequestMessages) -> list[Candidate]:
        """Receives the tokenized prompts. Returns the sequences to be queued; none if the request has ended."""
        self._expect(0)
        self.prompts = messages.prompts
        self._tokenized_at = self._now()
        self._record.tokenized(self.num_prompt_tokens)
        if self._over:
            return []
        self._messages = messages
        self.sequences = messages.sequences
        self._left = len(self.sequences)
        self._candidates = candidates_of(self, messages, self._number)
        if self._in_lockstep:
            self._lockstep = self._parts.lockstep.begin(self, messages, self._spawn)
            for candidate in self._candidates:
                candidate.needs_twin = True
        return self._candidates

    def prefer(self, index: int, engine: Address) -> None:
        """See `lockstep.Owner`."""
        self._candidates[index].preferred = engine

    def on_placed(self, index: int, open_failure: Failure | None) -> None:
        """See PlacementClient."""
        sequence, now = self.sequences[index], self._now()
        if self._over:
            return
        sequence.accepted(now)
        if self._lockstep is not None:
            self._lockstep.advance()
        self._record.accepted(index, sequence.attempt)
        if isinstance(open_failure, ServiceError):
            self.fail(open_failure)
        elif sequence.phase is Phase.RUNNING:
            assert sequence.engine is not None
            self._parts.watch.touch(sequence.engine, sequence.sequence_id, now)
            self._parts.moves.placed(sequence.sequence_id, sequence.engine.id)
            if open_failure is not None:
                assert sequence.detokenizer is not None
                self._repair(index, {sequence.detokenizer})

    def on_unplaced(self, index: int, engine: Address, detokenizer: Address | None, attempt: int) -> None:
        """See PlacementClient."""
        sequence = self.sequences[index]
        if self._over or sequence.phase is not Phase.PLACING:
            return
        sequence.unplaced()
        self._record.lost(index, attempt, "not accepted")
        self._places.forget(sequence, engine, detokenizer, self._spawn)
        self._spawn(self._places.tell_release(sequence.sequence_id, attempt, engine, detokenizer, "no place"))
        self._parts.dispatcher.requeue(self._candidates[index])

    def _place_again(self, index: int, release: str = "", *, planned: bool = False) -> bool:
        """Queues a running sequence for a new placement. Returns whether that was possible now.

        `release`: the reason of the `Cancel` to the engine; empty if the engine is gone or does not hold the sequence.
        `planned`: the engine is not lost but draining, so this does not count as a loss.
        """
        sequence = self.sequences[index]
        engine, detokenizer, attempt = sequence.engine, sequence.detokenizer, sequence.attempt
        if self._over or index in self._repairing or engine is None:
            return False
        if planned:
            sequence.taken_away()
            self._parts.moves.left(sequence.sequence_id, engine.id, len(sequence.token_ids))
        else:
            sequence.lost()
        self._record.lost(index, attempt, release or "the engine stopped responding")
        self._behind.discard(index)
        self._streamless.pop(index, None)
        self._places.forget(sequence, engine, detokenizer, self._spawn)
        told = engine if release else None
        self._spawn(self._places.tell_release(sequence.sequence_id, attempt, told, detokenizer, release))
        self._parts.dispatcher.requeue(self._candidates[index])
        return True

    # --- repairing streams ---

    def _repair(self, index: int, refused: set[Address] | None = None) -> None:
        if index not in self._repairing and self.sequences[index].phase is Phase.RUNNING:
            self._repairing.add(index)
            self._spawn(self._rebuild(index, refused or set()), index)

    async def _rebuild(self, index: int, refused: set[Address]) -> None:
        """Opens the stream again, preferably on its present detokenizer, and makes the engine send the missing tokens.

        A pooling sequence has no stream: the engine sends its vector again.
        """
        sequence = self.sequences[index]
        if self.request.pooling is not None:
            await self._retarget(index)
            return
        while not self._over and sequence.phase is Phase.RUNNING:
            detokenizer = self._places.detokenizer_for(sequence, refused)
            if detokenizer is None:
                self._streamless.setdefault(index, self._now())  # the next tick tries again
                return
            try:
                await self._clients.open_stream(detokenizer, self._messages.open_stream(index))
            except PeerUnavailableError:
                refused.add(detokenizer)
                continue
            if self._over or sequence.phase is not Phase.RUNNING:
                await self._clients.close_stream(detokenizer, sequence.sequence_id, sequence.attempt)
                return
            self._streamless.pop(index, None)
            former, attempt = sequence.detokenizer, sequence.attempt
            self._places.move_stream(sequence, detokenizer)
            self._record.stream_moved(index, detokenizer.id)
            await self._retarget(index)
            if former is not None and former != detokenizer:
                # A draining detokenizer waits for the end of its streams.
                await self._clients.close_stream(former, sequence.sequence_id, attempt)
            return

    async def _retarget(self, index: int) -> None:
        sequence = self.sequences[index]
        assert sequence.engine is not None
        try:
            await self._clients.retarget(sequence.engine, self._messages.retarget(index))
        except (PeerUnavailableError, ServiceError):
            self._repairing.discard(index)
            if sequence.phase is Phase.RUNNING and not self._over:
                self._place_again(index)
                self._parts.dispatcher.pump()

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
            self._places.forget(sequence, sequence.engine, sequence.detokenizer, self._spawn)
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
                index, delta.text, delta.token_ids, delta.logprobs, delta.text_offset, event.finish_reason,
                event.stop_reason, sequence.num_cached_tokens, sequence.cumulative_logprob, delta.prompt_logprobs,
            ),
        )  # fmt: skip

    def _push(self, sequence: SequenceState, update: SequenceUpdate) -> None:
        self._updates.append(update)
        if update.token_ids:
            self._record.arrived(update.index, len(update.token_ids))
        if update.finish_reason is not None:
            self._left -= 1
            self._places.forget(sequence, sequence.engine, sequence.detokenizer, self._spawn)
            self._parts.dispatcher.ended(self._candidates[update.index])
            self._spawn(self._places.tell_done(sequence))
        if self._left == 0:
            self._finish(None)
            self._close_candidates()
        elif len(self._updates) > limits.SLOW_CLIENT_EVENTS_MAX:
            self.fail(ServiceError("timeout", "The client reads too slowly."))
        if not self._is_due:
            self._is_due = True
            self._parts.deliveries.soon(self)

    def _finish(self, error: ServiceError | None) -> None:
        assert not self._over
        self._over, self.error = True, error
        self._take = None  # breaks a reference cycle
        self._expect(0)
        if self._lockstep is not None:
            self._lockstep.end()
        if self._record.keeps_content and self.prompts and self.sequences and self.request.pooling is None:
            request = replace(self.request, params=self.sent_params)
            self._record.content(content_of(request, self.card, self.prompts, self.sequences))
        if self._deadline is not None:
            self._deadline.cancel()
        self._parts.pictures.release(self.picture_files)
        self._wake.set()
        on_end, self._on_end = self._on_end, _nothing
        on_end()

    def _spawn(self, work: Coroutine[Any, Any, None], repaired: int | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._reap(done, repaired))

    def _reap(self, task: "asyncio.Task[None]", repaired: int | None) -> None:
        self._tasks.discard(task)
        if repaired is not None:
            self._repairing.discard(repaired)
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


def _engine_error(event: TextEvent | TokenEvent) -> ServiceError:
    code = event.error_code if event.error_code in CODES else "engine_failure"
    return ServiceError(code, event.error_message or "The engine could not go on with this request.")
