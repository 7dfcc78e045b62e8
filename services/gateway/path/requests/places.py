"""Releases the placements of a request's sequences: updates the gateway's records and notifies the members.

A placement consists of an engine, a detokenizer with the text stream, and possibly a prefill engine.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from services.gateway.path.gateway_parts import GatewayParts
from services.gateway.path.sequence_state import Address, SequenceState

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Places:
    """The placements of one request's sequences. `model`: its bus name.

    Methods whose names begin with `tell` only send messages and do not change this gateway's records. The others get a
    function `spawn` that runs a coroutine that sends messages.
    """

    def __init__(self, parts: GatewayParts, model: str) -> None:
        self._members, self._router, self._watch = parts.members, parts.router, parts.watch
        self._clients, self._clock = parts.clients, parts.host.clock
        self._model = model

    def forget(
        self, sequence: SequenceState, engine: Address | None, detokenizer: Address | None, spawn: Spawn
    ) -> None:
        """Removes a placement from this gateway's records (progress watch and router).

        Also notifies the prefill engine.
        """
        self.release_prefill(sequence, spawn)
        if engine is not None:
            self._watch.drop(engine, sequence.sequence_id)
            self._router.record_end(engine, sequence.sequence_id)
        if detokenizer is not None:
            self._router.stream_closed(detokenizer, sequence.sequence_id)

    def release_prefill(self, sequence: SequenceState, spawn: Spawn) -> None:
        """Tells the prefill engine that it may drop the prompt's computation."""
        prefill, sequence.prefill = sequence.prefill, None
        if prefill is not None and prefill.leads:
            self._router.record_end(prefill.engine, sequence.sequence_id)
            spawn(self._clients.done(prefill.engine, sequence.sequence_id, sequence.attempt))

    def move_stream(self, sequence: SequenceState, detokenizer: Address) -> None:
        """Records that the stream of a sequence was rebuilt on a detokenizer."""
        if sequence.detokenizer is not None:
            self._router.stream_closed(sequence.detokenizer, sequence.sequence_id)
        self._router.stream_opened(detokenizer, sequence.sequence_id)
        sequence.moved(detokenizer, self._clock.monotonic())

    def detokenizer_for(self, sequence: SequenceState, refused: set[Address]) -> Address | None:
        """Returns a detokenizer for a sequence's stream, preferably its present one; None if all are in `refused`."""
        alive = self._members.alive("detokenizer", self._clock.monotonic())
        here = sequence.detokenizer
        if here not in refused and any((d.id, d.instance_id) == here for d in alive):
            return here
        chosen = self._router.choose_detokenizer(alive, self._model, refused)
        address = Address(chosen.id, chosen.instance_id) if chosen is not None else None
        return None if address in refused else address

    async def tell_release_all(self, sequences: Sequence[SequenceState], reason: str) -> None:
        """Tells engines and detokenizers to drop the sequences."""
        for sequence in sequences:
            place = sequence.engine, sequence.detokenizer
            await self.tell_release(sequence.sequence_id, sequence.attempt, *place, reason)

    async def tell_release(
        self, name: str, attempt: int, engine: Address | None, detokenizer: Address | None, reason: str
    ) -> None:
        """Tells an engine and a detokenizer to drop the sequence `name`. None: no message to this member."""
        if engine is not None:
            await self._clients.cancel(engine, name, attempt, reason)
        if detokenizer is not None:
            await self._clients.close_stream(detokenizer, name, attempt)

    async def tell_done(self, sequence: SequenceState) -> None:
        """Tells the engine and the detokenizer of a finished sequence that they may drop its state."""
        if sequence.engine is not None:
            await self._clients.done(sequence.engine, sequence.sequence_id, sequence.attempt)
        if sequence.detokenizer is not None:
            await self._clients.close_stream(sequence.detokenizer, sequence.sequence_id, sequence.attempt)
