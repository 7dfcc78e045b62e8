"""Places waiting sequences on engines and detokenizers. Each gateway has one dispatcher.

`pump` takes sequences out of the queue while an engine has credit for the first one. It then sends one `SubmitBatch` to
each engine and one `OpenBatch` to each detokenizer, concurrently. There is no polling: `pump` is called when a sequence
is queued or ends, when a heartbeat arrives, and when a member is lost.
"""

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from antiphon.services.gateway.path.guest import Guests
from antiphon.services.gateway.path.placement.candidate import Candidate, Failure
from antiphon.services.gateway.path.placement.placement_queue import PlacementQueue
from antiphon.services.gateway.path.placement.queue_wait import QueueWaits
from antiphon.services.gateway.path.router import Router, configuration_of, model_of, ready_members
from antiphon.services.gateway.path.sequence_state import Address, Prefill
from antiphon.services.gateway.path.service_clients import PeerUnavailableError, ServiceClients
from antiphon.shared import limits
from antiphon.shared.actors.background import Background
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.codec import encode_split
from antiphon.shared.errors import CODES, ServiceError
from antiphon.shared.messages import (
    EngineStatus,
    Heartbeat,
    KvSource,
    Message,
    OpenBatch,
    OpenReply,
    OpenStream,
    Submit,
    SubmitBatch,
    SubmitReply,
)

T = TypeVar("T")
WAIT = Prefill(Address("", ""), KvSource("", ""))
"""Marker: prefill engines exist, but none has credit at the moment."""


class Dispatcher:
    """Places the sequences of one gateway. The request actors share `router`, and record ended sequences there."""

    def __init__(
        self, host: Host, members: Members, router: Router, clients: ServiceClients, guests: Guests | None = None
    ) -> None:
        """`guests` tell which engines may get work; by default all."""
        self._guests = guests or Guests()
        self.queue: PlacementQueue[Candidate] = PlacementQueue()
        self.waits = QueueWaits(self.queue, router, self._engines, host.clock.monotonic)
        self._host, self._members, self._router, self._clients = host, members, router, clients
        self._now = host.clock.monotonic
        self._able_at: dict[str, float] = {}
        """By model: the last time at which its members could accept a sequence, monotonic seconds."""
        self._background = Background("a dispatch failed")
        self._pumping = False

    # --- called by requests and by the gateway's actor ---

    def enqueue(self, candidates: Sequence[Candidate]) -> None:
        """Queues sequences and places those for which there is credit."""
        for candidate in candidates:
            self.push(candidate)
        self.pump()

    def push(self, candidate: Candidate) -> None:
        """Queues a sequence, also one that was placed before. The caller must call `pump` afterwards."""
        now = self._now()
        self._able_at.setdefault(candidate.model, now)
        num_output = len(candidate.sequence.token_ids)
        # Clients of sequences with output wait in mid-stream. The shortest ones are first, see `_turn`.
        candidate.turn = (0, candidate.num_tokens + num_output) if num_output else None
        self.queue.push(candidate, now)

    def withdraw(self, candidate: Candidate) -> None:
        """Removes a sequence from the queue, because its request has ended. Does nothing if it is not queued."""
        self.queue.withdraw(candidate)

    def ended(self, candidate: Candidate) -> None:
        """Records that a placed sequence has ended, with the number of tokens that it has used."""
        self.queue.settle(candidate, candidate.num_tokens + len(candidate.sequence.token_ids))
        self.waits.ended(candidate.model, idle=candidate.idle)

    def num_waiting(self, model: str) -> int:
        """Returns the number of sequences that wait for an engine of a model."""
        return sum(1 for _ in self.queue.tickets(model))

    def pump(self) -> None:
        """Places the sequences that can be placed now."""
        if self.waits.have_waited and not len(self.queue):
            self.waits.look()
        if self._pumping or not len(self.queue) or not self._host.transport.connected:
            return
        self._pumping = True  # if a request fails meanwhile and calls `pump`, the loop below sees the changed queue
        try:
            placed = self._place_all(self._now())
        finally:
            self._pumping = False
        if len(self.queue) or self.waits.have_waited:
            self.waits.look()
        if len(self.queue):
            self._guests.on_waiting(self.queue.models())
        self._send(placed)

    def _place_all(self, now: float) -> "list[Placement]":
        engines, detokenizers = self._engines(now), self._members.alive("detokenizer", now)
        placed: list[Placement] = []
        for model in self.queue.models():
            eligible: Callable[[str], bool] | None = None
            recovering = set[str]()  # clients whose next sequence has output of a lost placement and has to wait
            while True:
                may_be_next = _without(recovering, eligible) if recovering else eligible
                if (candidate := self.queue.first(model, may_be_next)) is None:
                    break
                placement = self._choose(candidate, engines, detokenizers, now)
                if isinstance(placement, Placement):
                    placed.append(placement)
                elif placement is None and candidate.recovers:
                    recovering.add(candidate.client.name)
                elif placement is None:
                    # If the next client has to wait for credit, another client may still send a sequence as a newcomer
                    # (see `Router.newcomers`).
                    newcomers = self._router.newcomers(ready_members(engines, model)) if eligible is None else None
                    if newcomers is None:
                        break
                    eligible = newcomers
            if self.queue.first(model) is not None:
                continue
            while (candidate := self.queue.first(model, idle=True)) is not None:
                placement = self._choose(candidate, engines, detokenizers, now)
                if placement is None:
                    break
                if isinstance(placement, Placement):
                    placed.append(placement)
        return placed

    def expire(self, now: float) -> None:
        """Fails the sequences whose model has had no member that can accept a sequence for QUEUE_WAIT_S.

        Also moves sequences whose time in the idle lane is over to the ordinary queue.
        """
        self.queue.promote(now)
        for model in list(self._able_at):
            if not self._host.transport.connected or self._unable(model, now) is None:
                self._able_at[model] = now
            elif now - self._able_at[model] > limits.QUEUE_WAIT_S:
                for candidate in self.queue.tickets(model):
                    # The failure of a request withdraws all its candidates.
                    if candidate.number and (reason := self._overdue(candidate, now)) is not None:
                        candidate.owner.fail(reason)

    # --- choosing ---

    def _engines(self, now: float) -> Sequence[Heartbeat]:
        """Returns the running engines that may get work."""
        return self._guests.eligible(self._members.alive("engine", now))

    def _overdue(self, candidate: Candidate, now: float) -> ServiceError | None:
        """Returns the error for a sequence if no member could accept it for QUEUE_WAIT_S of its wait; else None."""
        since = max(self._able_at[candidate.model], candidate.waits_since or 0.0)
        return self._unable(candidate.model, now) if now - since > limits.QUEUE_WAIT_S else None

    def _choose(
        self, candidate: Candidate, engines: Sequence[Heartbeat], detokenizers: Sequence[Heartbeat], now: float
    ) -> "Placement | ServiceError | None":
        """Removes the candidate from the queue and starts a placement, or fails its request. None if it has to wait."""
        sequence, model = candidate.sequence, candidate.model
        try:
            engines = self._fitting(candidate, engines, now)
        except ServiceError as error:
            candidate.owner.fail(error)
            return error
        client, idle, recovers = candidate.client.name, candidate.idle, candidate.recovers
        readers = () if candidate.stored is None else candidate.readers(engines)
        engine = self._router.choose_engine(
            engines,
            model,
            candidate.num_tokens,
            candidate.blocks,
            candidate.avoid,
            candidate.affinity(),
            client,
            joins=candidate.returns or candidate.searches,
            pools=not candidate.has_text,
            idle=idle,
            recovers=recovers,
            readers=readers,
        )
        has_text = candidate.has_text
        detokenizer = self._router.choose_detokenizer(detokenizers, model, candidate.avoid) if has_text else None
        if engine is None or (has_text and detokenizer is None):
            return None
        to_engine = Address(engine.id, engine.instance_id)
        has_kv = candidate.returns and candidate.preferred == to_engine
        candidate.placed_on(engine)
        status = engine.status if isinstance(engine.status, EngineStatus) else None
        is_decode = status is not None and status.role == "decode"
        prefill = self._prefill(candidate, engine, engines) if is_decode and not has_kv else None
        if prefill is WAIT:
            return None
        if sequence.attempt:
            self.queue.withdraw(candidate)  # its client was charged for the first placement
        else:
            self.queue.take(candidate)
        to_detokenizer = None
        if detokenizer is not None:
            to_detokenizer = Address(detokenizer.id, detokenizer.instance_id)
            self._router.stream_opened(to_detokenizer, sequence.sequence_id)
        sequence.start_placement(to_engine, to_detokenizer, now, prefill)
        stream_at = "" if to_detokenizer is None else to_detokenizer.id
        size = (status.max_num_seqs, status.block_size) if status is not None else ()
        record = candidate.messages.request.origin.record
        record.placed(candidate.index, sequence.attempt, to_engine.id, stream_at, *size)
        num_tokens = 1 if has_kv or prefill is not None else candidate.num_tokens + len(sequence.token_ids)
        recovers = recovers and to_engine not in readers
        self._router.record_dispatch(
            engine, sequence.sequence_id, num_tokens, candidate.blocks, client, idle=idle, recovers=recovers
        )
        attempt, settled = sequence.attempt, self._settled
        return Placement(
            candidate=candidate, engine=to_engine, detokenizer=to_detokenizer, attempt=attempt, settled=settled
        )

    def _fitting(self, candidate: Candidate, engines: Sequence[Heartbeat], now: float) -> list[Heartbeat]:
        """Returns the engines on which a sequence may run. Raises ServiceError if its request cannot continue."""
        if (sequence := candidate.sequence).losses:
            alive = {Address(beat.id, beat.instance_id) for beat in engines}
            silent = {lost for lost in sequence.lost_engines if self._members.is_silent("engine", *lost)}
            if sequence.retry_limit_reached(alive | silent):
                raise ServiceError("engine_failure", "Several engines failed on this request; it is not tried again.")
        if (overdue := self._overdue(candidate, now)) is not None:
            raise overdue
        return candidate.fitting(engines)

    def _prefill(self, candidate: Candidate, engine: Heartbeat, engines: Sequence[Heartbeat]) -> "Prefill | None":
        """Chooses the prefill engine that computes the prompt for the decode engine `engine`; records the dispatch.

        Returns None if `engine` computes the prompt itself, and `WAIT` if the others have no credit.
        """
        model, address = candidate.model, Address(engine.id, engine.instance_id)
        if not isinstance(engine.status, EngineStatus) or not candidate.takes_kv:
            return None
        if address in candidate.affinity():
            return candidate.prefill_of_sibling(address)
        num_tokens = candidate.num_tokens + len(candidate.sequence.token_ids)
        missing = self._router.num_missing_tokens(engine, num_tokens - 1, candidate.blocks)
        able, same = self._router.prefill_engines(engines, model, engine), engine.status.configuration
        if candidate.exact:
            able = [one for one in able if configuration_of(one) == same]
        if missing < limits.KV_TRANSFER_TOKENS_MIN or not able:
            return None
        client = candidate.client.name
        idle = candidate.idle
        chosen = self._router.choose_prefill(able, num_tokens, candidate.blocks, client, configuration=same, idle=idle)
        if chosen is None:
            return WAIT
        assert isinstance(chosen.status, EngineStatus)
        name = candidate.sequence.sequence_id
        self._router.record_dispatch(chosen, name, num_tokens, candidate.blocks, client, idle=idle)
        source = KvSource(secrets.token_hex(16), chosen.status.kv_address)
        return Prefill(Address(chosen.id, chosen.instance_id), source)

    def _unable(self, model: str, now: float) -> ServiceError | None:
        """Returns the reason why no member can accept a sequence of the model, now or later; None if one can."""
        engines = _of_model(self._engines(now), model)
        detokenizers = _of_model(self._members.alive("detokenizer", now), model)
        if ready_members(detokenizers, model) and self._router.can_take(engines, model):
            return None
        for service, members in (("detokenizer", detokenizers), ("engine", engines)):
            if all(member.state in ("stalled", "faulty") for member in members):
                message = f"No {service} of the model {model!r} is running. Try again shortly."
                return ServiceError(f"no_{service}", message, retry_after_s=2.0)
        message = f"No engine of the model {model!r} takes requests. Try again later."
        return ServiceError("server_is_overloaded", message, retry_after_s=self.waits.retry_after_s())

    # --- sending ---

    def _send(self, placed: "Sequence[Placement]") -> None:
        to_engines: dict[Address, list[tuple[Placement, Submit]]] = defaultdict(list)
        to_prefills: dict[Address, list[tuple[Placement, Submit]]] = defaultdict(list)
        to_detokenizers: dict[Address, list[tuple[Placement, OpenStream]]] = defaultdict(list)
        for placement in sorted(placed, key=_turn) if len(placed) > 1 else placed:
            candidate = placement.candidate
            messages, index, prefill = candidate.messages, candidate.index, candidate.sequence.prefill
            to_engines[placement.engine].append((placement, messages.submit(index)))
            if prefill is not None and prefill.leads:
                to_prefills[prefill.engine].append((placement, messages.submit_prefill(index)))
            if placement.detokenizer is not None:
                to_detokenizers[placement.detokenizer].append((placement, messages.open_stream(index)))
            else:
                placement.opened(None)
        # Streams are sent first, so that a stream is usually open when the first tokens of its sequence arrive.
        for detokenizer, streams in to_detokenizers.items():
            for part, data in _batches(streams, limits.OPEN_BATCH_MAX, OpenBatch):
                self._background.spawn(self._open(detokenizer, part, data))
        for engine, submits in to_prefills.items():
            for part, data in _batches(submits, limits.SUBMIT_BATCH_MAX, SubmitBatch):
                self._background.spawn(self._submit_prefills(engine, part, data))
        for engine, submits in to_engines.items():
            for part, data in _batches(submits, limits.SUBMIT_BATCH_MAX, SubmitBatch):
                self._background.spawn(self._submit(engine, part, data))

    async def _open(self, detokenizer: Address, items: Sequence[tuple["Placement", OpenStream]], data: bytes) -> None:
        try:
            replies = (await self._clients.open_batch(detokenizer, data)).replies
        except (PeerUnavailableError, ServiceError) as error:
            if _can_be_halved(error, items):
                for half, part in _batches(items, len(items) // 2, OpenBatch):
                    self._background.spawn(self._open(detokenizer, half, part))
                return
            for placement, _ in items:
                placement.opened(error)
        else:
            for (placement, _), reply in zip(items, replies, strict=True):
                placement.opened(_open_failure(reply))
        self.pump()

    async def _submit_prefills(self, engine: Address, items: Sequence[tuple["Placement", Submit]], data: bytes) -> None:
        """Sends prompts to a prefill engine.

        If that fails, the decode engines detect it and compute the prompts themselves.
        """
        try:
            replies = (await self._clients.submit_batch(engine, data)).replies
        except (PeerUnavailableError, ServiceError) as error:
            if _can_be_halved(error, items):
                for half, part in _batches(items, len(items) // 2, SubmitBatch):
                    self._background.spawn(self._submit_prefills(engine, half, part))
                return
            for _, submit in items:
                self._router.record_silence(engine, submit.sequence_id)
        else:
            for reply in replies:
                accepted = reply.status in ("accepted", "duplicate", "invalid")
                self._router.record_answer(engine, reply.sequence_id, accepted=accepted)
        self.pump()

    async def _submit(self, engine: Address, items: Sequence[tuple["Placement", Submit]], data: bytes) -> None:
        try:
            replies = (await self._clients.submit_batch(engine, data)).replies
        except (PeerUnavailableError, ServiceError) as error:
            if _can_be_halved(error, items):
                for half, part in _batches(items, len(items) // 2, SubmitBatch):
                    self._background.spawn(self._submit(engine, half, part))
                return
            for placement, submit in items:
                if isinstance(error, PeerUnavailableError):
                    self._router.record_silence(engine, submit.sequence_id)
                placement.submitted(error)
        else:
            for (placement, _), reply in zip(items, replies, strict=True):
                failure = _submit_failure(reply)
                # The refusal of an invalid sequence does not mean that the engine is full.
                invalid = isinstance(failure, ServiceError)
                self._router.record_answer(engine, reply.sequence_id, accepted=failure is None or invalid)
                placement.submitted(failure)
        self.pump()

    def _settled(self, placement: "Placement") -> None:
        """Handles the result of a placement, when its members have answered or timed out."""
        candidate, sequence = placement.candidate, placement.candidate.sequence
        if sequence.attempt != placement.attempt or sequence.engine != placement.engine:
            return  # the request has ended meanwhile
        failure = placement.submit_failure
        if failure is None:
            candidate.avoid.clear()
            candidate.waits_since = None
            candidate.owner.on_placed(candidate.index, placement.open_failure)
        elif isinstance(failure, ServiceError):
            candidate.owner.fail(failure)
        else:
            candidate.avoid.add(placement.engine)
            candidate.owner.on_unplaced(candidate.index, placement.engine, placement.detokenizer, placement.attempt)


@dataclass(eq=False, slots=True, kw_only=True)
class Placement:
    """One placement in progress. Calls `settled` when the answers to `SubmitBatch` and `OpenBatch` are known.

    Without a detokenizer (a pooling sequence) there is no `OpenBatch`.
    """

    candidate: Candidate
    engine: Address
    detokenizer: Address | None
    attempt: int
    settled: "Callable[[Placement], None]"
    open_failure: Failure | None = None
    submit_failure: Failure | None = None
    outcomes_left: int = 2

    def opened(self, failure: Failure | None) -> None:
        """Records the detokenizer's answer; None: the stream is open."""
        self.open_failure = failure
        self._settle()

    def submitted(self, failure: Failure | None) -> None:
        """Records the engine's answer; None: accepted. A ServiceError fails the request, see `Failure`."""
        self.submit_failure = failure
        self._settle()

    def _settle(self) -> None:
        self.outcomes_left -= 1
        if not self.outcomes_left:
            self.settled(self)


def _turn(placement: Placement) -> tuple[bool, int]:
    """Returns the order in which sequences that are placed at the same time are sent to engines.

    After the loss of an engine, sequences with output come first, because their clients wait in mid-stream. Among them,
    those with the fewest tokens come first, because all tokens must be computed again; in the order of arrival, a long
    sequence would delay all others. New sequences keep their order.
    """
    candidate, num_output = placement.candidate, len(placement.candidate.sequence.token_ids)
    return (False, candidate.num_tokens + num_output) if num_output else (True, 0)


def _without(clients: Set[str], eligible: Callable[[str], bool] | None) -> Callable[[str], bool]:
    """Returns a function that tells whether a client is `eligible` (None: every client) and not one of `clients`."""
    return lambda client: client not in clients and (eligible is None or eligible(client))


def _batches(
    items: Sequence[tuple[Placement, T]], count_max: int, batch: Callable[[tuple[T, ...]], Message]
) -> Iterator[tuple[Sequence[tuple[Placement, T]], bytes]]:
    """Encodes the messages in batches of at most `count_max` items and BATCH_BYTES_MAX bytes.

    Yields the items of each batch with its bytes.
    """

    def message(part: Sequence[tuple[Placement, T]]) -> Message:
        return batch(tuple(each for _, each in part))

    for start in range(0, len(items), count_max):
        yield from encode_split(message, items[start : start + count_max])


def _can_be_halved(error: Failure, items: Sequence[object]) -> bool:
    """Whether the batch was too large for the bus and can be split: `max_payload` may be below BATCH_BYTES_MAX."""
    return isinstance(error, ServiceError) and error.code == "request_too_large" and len(items) > 1


def _of_model(members: Sequence[Heartbeat], model: str) -> list[Heartbeat]:
    return [member for member in members if model_of(member) == model]


def _open_failure(reply: OpenReply) -> Failure | None:
    return None if not reply.code else _failure(reply.code, reply.message, reply.param, reply.retry_after_s)


def _submit_failure(reply: SubmitReply) -> Failure | None:
    if reply.status in ("accepted", "duplicate"):
        return None
    if reply.status == "invalid":
        return ServiceError(reply.code if reply.code in CODES else "internal_error", reply.message)
    return PeerUnavailableError(reply.status)


def _failure(code: str, message: str, param: str, retry_after_s: float) -> Failure:
    error = ServiceError(code if code in CODES else "internal_error", message, param=param, retry_after_s=retry_after_s)
    return PeerUnavailableError(code) if error.retryable else error
