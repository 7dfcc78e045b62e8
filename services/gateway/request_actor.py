"""The request actor: conducts one HTTP request from its tokens to its end, which it reaches exactly once.

It tokenizes, places each sequence on an engine and a detokenizer, takes in text events, repairs streams and placements
that break, and tells everybody when it is over. The state of each sequence is an `owner.SequenceOwner`, which decides;
this shell acts. The gateway's actor feeds it events and ticks; the HTTP edge reads its updates.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from services.gateway import orders
from services.gateway.generation import GenerationRequest, ModelCard, SequenceUpdate
from services.gateway.owner import Address, Gain, Phase, SequenceOwner, Verdict
from services.gateway.peers import Peers, PeerUnavailableError
from services.gateway.placement import PlacementBoard, model_of
from services.gateway.prompts import Prompt, prepare, sequence_params
from shared import limits
from shared.actors.host import Host
from shared.actors.presence import Members
from shared.blocks import split_hashes
from shared.errors import CODES, ServiceError
from shared.messages import Heartbeat, Retarget, SequenceMark, Submit, TextEvent
from shared.sampling import SamplingParams

PLACE_PAUSE_S = 0.05


class RequestActor:
    """One request. Implements `generation.Generation`."""

    def __init__(
        self,
        host: Host,
        members: Members,
        board: PlacementBoard,
        peers: Peers,
        request: GenerationRequest,
        card: ModelCard,
    ) -> None:
        self.request = request
        self.sequences: list[SequenceOwner] = []
        self.prompts: list[Prompt] = []
        self.error: ServiceError | None = None
        self._host, self._members, self._board, self._peers, self._card = host, members, board, peers, card
        self._updates: deque[SequenceUpdate] = deque()
        self._wake = asyncio.Event()
        self._left = 0
        self._over = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._repairing: set[int] = set()
        self._streams: dict[int, Address] = {}

    # --- Generation ---

    @property
    def prompt_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """See Generation."""
        return tuple(prompt.token_ids for prompt in self.prompts)

    async def updates(self) -> AsyncIterator[list[SequenceUpdate]]:
        """See Generation."""
        while True:
            if self._updates:
                batch = list(self._updates)
                self._updates.clear()
                yield batch
                continue
            if self._over:
                break
            self._wake.clear()
            await self._wake.wait()
        if self.error is not None:
            raise self.error

    async def cancel(self, reason: str) -> None:
        """See Generation."""
        if self._over:
            return
        self._finish(ServiceError("client_closed_request", f"The request was cancelled: {reason}."))
        for index, sequence in enumerate(self.sequences):
            if sequence.phase is not Phase.DONE:
                await self._release(index, reason)

    # --- the gateway's actor calls these ---

    @property
    def over(self) -> bool:
        """True once the request has ended, whichever way."""
        return self._over

    def start(self) -> None:
        """Begins conducting."""
        self._spawn(self._conduct())

    def on_text(self, index: int, event: TextEvent, engine: Address) -> None:
        """A text event for sequence `index`."""
        sequence = self.sequences[index]
        verdict, gain = sequence.take(event, engine, self._now())
        if verdict is Verdict.GAP:
            self._repair(index)
        elif verdict is Verdict.DIVERGED:
            self._fail(ServiceError("engine_failure", "The engine contradicted its own output."))
        elif gain is not None:
            if event.finish_reason == "error":
                self._fail(_engine_error(event))
                return
            self._emit(index, sequence, event, gain)

    def on_mark(self, index: int, mark: SequenceMark) -> None:
        """The engine's heartbeat lists sequence `index`."""
        self.sequences[index].mark(mark, self._now())

    def on_lost(self, member: Address) -> None:
        """A service died."""
        for index, sequence in enumerate(self.sequences):
            if sequence.phase is Phase.RUNNING and sequence.engine == member:
                self._place_again(index)
            elif sequence.phase is Phase.RUNNING and sequence.detokenizer == member:
                self._repair(index)

    def tick(self, now: float) -> None:
        """Looks for what has gone silent."""
        for index, sequence in enumerate(self.sequences):
            if sequence.stalled(now):
                self._repair(index)
            elif sequence.forgotten(now):
                self._place_again(index)

    def resumed(self, now: float) -> None:
        """Our own link to the bus was down: nobody's silence counts until now."""
        for sequence in self.sequences:
            sequence.touch(now)

    def fail(self, error: ServiceError) -> None:
        """Ends the request with an error, unless it has ended."""
        self._fail(error)

    # --- conducting ---

    async def _conduct(self) -> None:
        self.prompts = await prepare(self._peers, self.request, self._card, self._block_size())
        count = len(self.prompts) * self.request.n
        self._left = count
        self.sequences = [SequenceOwner(sequence_id(self.request.request_id, i)) for i in range(count)]
        for index in range(count):
            self._spawn(self._place(index))

    async def _place(self, index: int) -> None:
        sequence, refused = self.sequences[index], set[tuple[str, str]]()
        deadline = self._now() + limits.QUEUE_WAIT_S
        while not self._over:
            if sequence.hopeless(self._living_engines()):
                raise ServiceError("engine_failure", "Several engines failed on this request; it is not tried again.")
            pair = self._choose(index, refused)
            if pair is None:
                if self._now() > deadline:
                    raise self._nowhere()
                refused.clear()
                await asyncio.sleep(PLACE_PAUSE_S)
                continue
            if await self._try_place(index, *pair, refused):
                return

    async def _try_place(
        self, index: int, engine: Heartbeat, detokenizer: Heartbeat, refused: set[tuple[str, str]]
    ) -> bool:
        sequence, prompt = self.sequences[index], self._prompt(index)
        to_engine, to_detokenizer = Address(engine.id, engine.boot), Address(detokenizer.id, detokenizer.boot)
        sequence.start_placement(to_engine, to_detokenizer, self._now())
        self._board.placed(engine, len(prompt.token_ids), split_hashes(prompt.block_hashes))
        self._stream_at(index, to_detokenizer)
        try:
            await self._open(index, to_detokenizer)
        except PeerUnavailableError:
            refused.add(to_detokenizer)
            return False
        try:
            reply = await self._peers.submit(to_engine, self._submit(index), self.request.trace_headers)
        except PeerUnavailableError:
            refused.add(to_engine)
            await self._release(index, "no answer")
            return False
        if reply.status in ("accepted", "duplicate"):
            sequence.accepted(self._now())
            return True
        if reply.status == "invalid":
            raise ServiceError(reply.code, reply.message)
        refused.add(to_engine)
        return False

    async def _rebuild(self, index: int) -> None:
        """Opens the stream anew, here or elsewhere, and has the engine send what is missing."""
        sequence = self.sequences[index]
        refused = set[tuple[str, str]]()
        while not self._over and sequence.phase is Phase.RUNNING:
            detokenizer = self._detokenizer_for(sequence, refused)
            if detokenizer is None:
                refused.clear()
                await asyncio.sleep(PLACE_PAUSE_S)
                continue
            assert sequence.engine is not None
            try:
                await self._open(index, detokenizer)
            except PeerUnavailableError:
                refused.add(detokenizer)
                continue
            self._stream_at(index, detokenizer)
            sequence.moved(detokenizer, self._now())
            sink = self._host.subjects.detokenizer_tokens(*detokenizer)
            position = len(sequence.token_ids)
            try:
                await self._peers.retarget(
                    sequence.engine, Retarget(sequence.request_id, sequence.epoch, sink, position)
                )
            except (PeerUnavailableError, ServiceError):
                if sequence.phase is Phase.RUNNING:
                    sequence.lost()
                    await self._place(index)
            return

    def _repair(self, index: int) -> None:
        if index not in self._repairing:
            self._repairing.add(index)
            self._spawn(self._rebuild(index), index)

    def _place_again(self, index: int) -> None:
        if index not in self._repairing:
            self._repairing.add(index)
            self.sequences[index].lost()
            self._spawn(self._place(index), index)

    async def _open(self, index: int, detokenizer: Address) -> None:
        message = orders.open_stream(self._host, self.request, self._card, self.sequences[index], self._prompt(index))
        await self._peers.open_stream(detokenizer, message, self.request.trace_headers)

    def _submit(self, index: int) -> Submit:
        prompt, params = self._prompt(index), self._params(index)
        choices = self._choices(index)
        family = choices[0].request_id if len(choices) > 1 else ""
        return orders.submit(self._host, self.request, self.sequences[index], prompt, params, family)

    # --- letting go ---

    async def _release(self, index: int, reason: str) -> None:
        """Engine and detokenizer drop a sequence that will not be finished there."""
        sequence = self.sequences[index]
        if sequence.engine is not None:
            await self._peers.cancel(sequence.engine, sequence.request_id, sequence.epoch, reason)
        await self._close(index)

    async def _settle(self, index: int) -> None:
        """Engine and detokenizer may forget a finished sequence."""
        sequence = self.sequences[index]
        if sequence.engine is not None:
            await self._peers.done(sequence.engine, sequence.request_id, sequence.epoch)
        await self._close(index)

    async def _close(self, index: int) -> None:
        sequence = self.sequences[index]
        self._stream_at(index, None)
        if sequence.detokenizer is not None:
            await self._peers.close_stream(sequence.detokenizer, sequence.request_id, sequence.epoch)

    def _stream_at(self, index: int, detokenizer: Address | None) -> None:
        """Keeps the board's count of our streams at each detokenizer."""
        before = self._streams.pop(index, None)
        if before is not None:
            self._board.stream_closed(before)
        if detokenizer is not None:
            self._streams[index] = detokenizer
            self._board.stream_opened(detokenizer)

    # --- choices ---

    def _choose(self, index: int, refused: set[tuple[str, str]]) -> tuple[Heartbeat, Heartbeat] | None:
        prompt, now = self._prompt(index), self._now()
        hashes = split_hashes(prompt.block_hashes)
        engines = self._members.alive("engine", now)
        near = {one.engine for one in self._choices(index) if one.engine is not None and one.phase is not Phase.DONE}
        engine = self._board.choose_engine(engines, self._card.name, len(prompt.token_ids), hashes, refused, near)
        alive = self._members.alive("detokenizer", now)
        detokenizer = self._board.choose_detokenizer(alive, self._card.name, refused)
        return (engine, detokenizer) if engine is not None and detokenizer is not None else None

    def _living_engines(self) -> set[Address]:
        return {Address(engine.id, engine.boot) for engine in self._members.alive("engine", self._now())}

    def _detokenizer_for(self, sequence: SequenceOwner, refused: set[tuple[str, str]]) -> Address | None:
        alive = self._members.alive("detokenizer", self._now())
        here = sequence.detokenizer
        if here not in refused and any((d.id, d.boot) == here for d in alive):
            return here
        chosen = self._board.choose_detokenizer(alive, self._card.name, refused)
        return Address(chosen.id, chosen.boot) if chosen is not None else None

    def _nowhere(self) -> ServiceError:
        for service in ("detokenizer", "engine"):
            if not self._members_of_model(service):
                told = f"No {service} of the model {self._card.name!r} is running. Try again shortly."
                return ServiceError(f"no_{service}", told, retry_after_s=2.0)
        return ServiceError("server_is_overloaded", "Every engine's queue is full. Try again later.", retry_after_s=2.0)

    def _block_size(self) -> int:
        for engine in self._members_of_model("engine"):
            block_size = getattr(engine.status, "block_size", 0)
            if block_size:
                return block_size
        return 0

    def _members_of_model(self, service: str) -> list[Heartbeat]:
        alive = self._members.alive(service, self._now())
        return [member for member in alive if model_of(member) == self._card.name]

    def _choices(self, index: int) -> list[SequenceOwner]:
        """The sequences of the same prompt."""
        first = index - index % self.request.n
        return self.sequences[first : first + self.request.n]

    def _prompt(self, index: int) -> Prompt:
        return self.prompts[index // self.request.n]

    def _params(self, index: int) -> SamplingParams:
        prompt = self._prompt(index)
        return sequence_params(self.request.params, index % self.request.n, len(prompt.token_ids), self._card)

    # --- the end ---

    def _emit(self, index: int, sequence: SequenceOwner, event: TextEvent, gain: Gain) -> None:
        self._updates.append(
            SequenceUpdate(
                index, gain.text, gain.token_ids, gain.logprobs, gain.text_offset, event.finish_reason,
                event.stop_reason, sequence.num_cached_tokens, sequence.cumulative_logprob,
            )
        )  # fmt: skip
        if event.finish_reason is not None:
            self._left -= 1
            self._spawn(self._settle(index))
        if self._left == 0:
            self._finish(None)
        elif len(self._updates) > limits.SLOW_CLIENT_EVENTS_MAX:
            self._fail(ServiceError("timeout", "The client reads too slowly."))
        self._wake.set()

    def _fail(self, error: ServiceError) -> None:
        if self._over:
            return
        self._finish(error)
        for index, sequence in enumerate(self.sequences):
            if sequence.phase is not Phase.DONE or sequence.finish_reason == "error":
                self._spawn(self._release(index, error.code))

    def _finish(self, error: ServiceError | None) -> None:
        assert not self._over
        self._over, self.error = True, error
        self._wake.set()

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
        self._fail(error)

    def _now(self) -> float:
        return self._host.clock.monotonic()


def sequence_id(request_id: str, index: int) -> str:
    """The bus name of one sequence of a request."""
    return f"{request_id}-{index}"


def split_sequence_id(name: str) -> tuple[str, int]:
    """The request and index behind a sequence's bus name. Raises ValueError for a foreign name."""
    request_id, _, index = name.rpartition("-")
    return request_id, int(index)


def _engine_error(event: TextEvent) -> ServiceError:
    code = event.error_code if event.error_code in CODES else "engine_failure"
    return ServiceError(code, event.error_message or "The engine could not go on with this request.")
