"""Where the sequences of a request run: has them placed again when a member is lost or drains, and releases what ended.

A placement consists of an engine, a detokenizer with the text stream, and possibly a prefill engine.
"""

from collections.abc import Sequence

from antiphon.services.gateway.path.gateway_parts import GatewayParts
from antiphon.services.gateway.path.guest import RequestGuest, Running
from antiphon.services.gateway.path.messages import RequestMessages
from antiphon.services.gateway.path.placement.candidate import Candidate, Failure, StoredKv, candidates_of
from antiphon.services.gateway.path.requests.repairs import Repairs
from antiphon.services.gateway.path.sequence_state import Address, Phase, SequenceState
from antiphon.services.gateway.path.service_clients import ServiceClients
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import SequenceMark

MOVED = "moved"
"""Reason in the request's record for leaving a draining engine."""


class Placements:
    """The placements of one request's sequences. Implements `candidate.PlacementClient`.

    `owner`: the request. It is forgotten at its end (`leave`, `close`), because the two would be a reference cycle, and
    the objects of each request would wait for the garbage collector.
    """

    def __init__(self, parts: GatewayParts, owner: Running) -> None:
        self._parts, self._clients, self._clock = parts, parts.clients, parts.host.clock
        self._owner: Running | None = owner
        self._record = owner.request.origin.record
        self._sequences: list[SequenceState] = []
        self._candidates: list[Candidate] = []
        self._repairs: Repairs | None = None
        """None until a stream has to be repaired."""

    def candidates(
        self, messages: RequestMessages, number: int, guests: Sequence[RequestGuest] = ()
    ) -> list[Candidate]:
        """Returns the sequences to be queued. `number`: the request's number in the order of arrival."""
        self._sequences = messages.sequences
        self._candidates = candidates_of(self, messages, number, guests)
        return self._candidates

    def prefer(self, index: int, engine: Address) -> None:
        """See Running."""
        self._candidates[index].preferred = engine

    # --- the dispatcher calls these ---

    def on_placed(self, index: int, open_failure: Failure | None) -> None:
        """See PlacementClient."""
        if self._owner is None:
            return
        sequence, now = self._sequences[index], self._clock.monotonic()
        sequence.accepted(now)
        for guest in self._candidates[index].guests:
            guest.placed()
        self._record.accepted(index, sequence.attempt)
        if isinstance(open_failure, ServiceError):
            self.fail(open_failure)
        elif sequence.phase is Phase.RUNNING:
            assert sequence.engine is not None
            self._parts.watch.touch(sequence.engine, sequence.sequence_id, now)
            if len(sequence.engines) > 1:
                self._parts.moves.placed(sequence.sequence_id, sequence.engine.id)
            if open_failure is not None:
                assert sequence.detokenizer is not None
                self.repair(index, {sequence.detokenizer})

    def on_unplaced(self, index: int, engine: Address, detokenizer: Address | None, attempt: int) -> None:
        """See PlacementClient."""
        if self._owner is None or (sequence := self._sequences[index]).phase is not Phase.PLACING:
            return
        sequence.unplaced()
        self._record.lost(index, attempt, "not accepted")
        self._forget(sequence, engine, detokenizer)
        self._owner.spawn(_tell_release(self._clients, sequence.sequence_id, attempt, engine, detokenizer, "no place"))
        self._parts.dispatcher.push(self._candidates[index])

    def fail(self, error: ServiceError) -> None:
        """See PlacementClient."""
        if self._owner is not None:
            self._owner.fail(error)

    # --- output arrives ---

    def has_stream(self, index: int, detokenizer: Address) -> bool:
        """Whether the text of sequence `index` may come from this detokenizer."""
        return self._sequences[index].detokenizer == detokenizer or self._is_repaired(index)

    def owns(self, index: int, attempt: int, member: Address) -> bool:
        """Whether an engine or a detokenizer has to keep sequence `index` at this attempt."""
        sequence = self._sequences[index]
        if sequence.phase not in (Phase.PLACING, Phase.RUNNING) or sequence.attempt != attempt:
            return False
        prefill = sequence.prefill.engine if sequence.prefill is not None else None
        return member in (sequence.engine, sequence.detokenizer, prefill) or self._is_repaired(index)

    def on_output(self, sequence: SequenceState, engine: Address, now: float, *, has_tokens: bool) -> None:
        """Records that new output of a sequence has arrived from its engine."""
        if has_tokens:
            if sequence.prefill is not None:
                self._release_prefill(sequence)
            self._parts.router.record_output(engine, sequence.sequence_id)
        if sequence.phase is Phase.RUNNING:
            self._parts.watch.touch(engine, sequence.sequence_id, now)

    def on_end(self, index: int) -> None:
        """Releases the placement of a sequence that has ended by itself."""
        sequence = self._sequences[index]
        self._forget(sequence, sequence.engine, sequence.detokenizer)
        self._parts.dispatcher.ended(self._candidates[index])
        assert self._owner is not None
        self._owner.spawn(_tell_done(self._clients, sequence))

    # --- members are lost. The caller must call `Dispatcher.pump` afterwards ---

    def on_mark(self, index: int, mark: SequenceMark, engine: Address) -> None:
        """Handles the engine's report of the progress of sequence `index`."""
        if any(guest.holds(index) for guest in self._candidates[index].guests):
            return  # the text is here
        if self._sequences[index].engine == engine:
            self._repairing().on_mark(index, mark)

    def on_missing(self, index: int, attempt: int, engine: Address) -> None:
        """Queues sequence `index` again, because its engine does not have it."""
        sequence = self._sequences[index]
        if sequence.phase is Phase.RUNNING and (sequence.attempt, sequence.engine) == (attempt, engine):
            self._place_again(index)

    def on_lost(self, member: Address, stored: StoredKv | None = None) -> None:
        """Queues the sequences of a lost engine again, or rebuilds the streams of a lost detokenizer.

        `stored`: where the KV of the lost engine is stored.
        """
        for index, sequence in enumerate(self._sequences):
            if sequence.prefill is not None and sequence.prefill.engine == member:
                sequence.prefill = None  # the engine that waits for the KV notices it and computes the prompt
            if sequence.phase is Phase.RUNNING and sequence.engine == member:
                self._candidates[index].stored = stored
                if self._parts.members.is_silent("engine", *member):
                    # If it goes on, it need not compute for nobody, and it still has the KV in its cache.
                    self._candidates[index].returns_to(member)
                    self._place_again(index, release="the engine stopped responding")
                else:
                    self._place_again(index)
            elif sequence.phase is Phase.RUNNING and sequence.detokenizer == member:
                self.repair(index)

    def on_stalled(self, engine: Address) -> None:
        """Moves the running sequences away from an engine whose step hangs, and tells the engine to drop them."""
        for index, sequence in enumerate(self._sequences):
            if sequence.prefill is not None and sequence.prefill.engine == engine:
                self._release_prefill(sequence)
            if sequence.phase is Phase.RUNNING and sequence.engine == engine:
                self._place_again(index, release="the engine stands still")

    def on_draining(self, member: Address, room: int) -> int:
        """Moves up to `room` running sequences away from a draining engine, or streams from a draining detokenizer.

        Returns how many sequences have left the engine. Beam searches and pooling sequences stay, because they would
        have to begin again; so do requests that only this engine may run.
        """
        assert self._owner is not None
        moved, request = 0, self._owner.request
        stays = request.params.beam is not None or request.pooling is not None or bool(request.guests.engine)
        for index, sequence in enumerate(self._sequences):
            if sequence.phase is not Phase.RUNNING:
                continue
            if sequence.engine == member and not stays and moved < room:
                moved += self._place_again(index, release=MOVED, planned=True)
            elif sequence.detokenizer == member and self._repairing().detokenizer_for(sequence, {member}) is not None:
                self.repair(index, {member})
        return moved

    def tick(self, now: float) -> None:
        """Repairs streams, see `Repairs`."""
        if self._repairs is not None:
            self._repairs.tick(now)

    def repair(self, index: int, refused: set[Address] | None = None) -> None:
        """Opens the stream of a running sequence again. `refused`: detokenizers to avoid."""
        self._repairing().begin(index, refused)

    def _place_again(self, index: int, release: str = "", *, planned: bool = False) -> bool:
        """Queues a running sequence for a new placement. Returns whether that was possible now.

        `release`: the reason of the `Cancel` to the engine; empty if the engine is gone or does not hold the sequence.
        `planned`: the engine is not lost but draining, so this does not count as a loss.
        """
        sequence = self._sequences[index]
        engine, detokenizer, attempt = sequence.engine, sequence.detokenizer, sequence.attempt
        if self._owner is None or self._is_repaired(index) or engine is None:
            return False
        if planned:
            sequence.taken_away()
            self._parts.moves.left(sequence.sequence_id, engine.id, len(sequence.token_ids))
        else:
            sequence.lost()
        self._record.lost(index, attempt, release or "the engine stopped responding")
        if self._repairs is not None:
            self._repairs.drop(index)
        self._forget(sequence, engine, detokenizer)
        told = engine if release else None
        self._owner.spawn(_tell_release(self._clients, sequence.sequence_id, attempt, told, detokenizer, release))
        self._parts.dispatcher.push(self._candidates[index])
        return True

    def _is_repaired(self, index: int) -> bool:
        return self._repairs is not None and index in self._repairs.running

    def _repairing(self) -> Repairs:
        if self._repairs is None:
            assert self._owner is not None
            self._repairs = Repairs(self._parts, self._owner, self._place_again)
        return self._repairs

    # --- the end ---

    def leave(self) -> list[SequenceState]:
        """Removes all sequences from the queue, and the placements of unfinished ones from the gateway's records.

        Returns the sequences that their engine and detokenizer must drop (`tell_release_all`): unfinished ones and
        those that failed.
        """
        unfinished = [s for s in self._sequences if s.phase is not Phase.DONE or s.finish_reason == "error"]
        for candidate in self._candidates:
            self._parts.dispatcher.withdraw(candidate)
            if candidate.sequence.attempt and candidate.sequence.phase is not Phase.DONE:
                self._parts.dispatcher.ended(candidate)
        for sequence in unfinished:
            self._forget(sequence, sequence.engine, sequence.detokenizer)
        self.close()
        self._parts.dispatcher.pump()
        return unfinished

    def close(self) -> None:
        """Forgets the request, which has ended, and its candidates, which know these placements."""
        self._candidates = []
        self._owner = self._repairs = None
        self._sequences = []

    def _forget(self, sequence: SequenceState, engine: Address | None, detokenizer: Address | None) -> None:
        """Removes a placement from the gateway's records (progress watch and router). Tells the prefill engine."""
        if sequence.prefill is not None:
            self._release_prefill(sequence)
        if engine is not None:
            self._parts.watch.drop(engine, sequence.sequence_id)
            self._parts.router.record_end(engine, sequence.sequence_id)
        if detokenizer is not None:
            self._parts.router.stream_closed(detokenizer, sequence.sequence_id)

    def _release_prefill(self, sequence: SequenceState) -> None:
        """Tells the prefill engine that it may drop the prompt's computation."""
        prefill, sequence.prefill = sequence.prefill, None
        if prefill is not None and prefill.leads and self._owner is not None:
            self._parts.router.record_end(prefill.engine, sequence.sequence_id)
            self._owner.spawn(self._clients.done(prefill.engine, sequence.sequence_id, sequence.attempt))


async def tell_release_all(clients: ServiceClients, sequences: Sequence[SequenceState], reason: str) -> None:
    """Tells engines and detokenizers to drop the sequences."""
    for sequence in sequences:
        place = sequence.engine, sequence.detokenizer
        await _tell_release(clients, sequence.sequence_id, sequence.attempt, *place, reason)


async def _tell_release(
    clients: ServiceClients, name: str, attempt: int, engine: Address | None, detokenizer: Address | None, reason: str
) -> None:
    """Tells an engine and a detokenizer to drop the sequence `name`. None: no message to this member."""
    if engine is not None:
        await clients.cancel(engine, name, attempt, reason)
    if detokenizer is not None:
        await clients.close_stream(detokenizer, name, attempt)


async def _tell_done(clients: ServiceClients, sequence: SequenceState) -> None:
    """Tells the engine and the detokenizer of a finished sequence that they may drop its state."""
    if sequence.engine is not None:
        await clients.done(sequence.engine, sequence.sequence_id, sequence.attempt)
    if sequence.detokenizer is not None:
        await clients.close_stream(sequence.detokenizer, sequence.sequence_id, sequence.attempt)
