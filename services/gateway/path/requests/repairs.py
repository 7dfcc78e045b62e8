"""Opens the text streams of a request's sequences again, and has engines send the tokens that are missing.

A stream is repaired when its detokenizer is lost or drains, when a position is missing, or when an engine has tokens
that did not arrive.
"""

from collections.abc import Callable

from antiphon.services.gateway.path.gateway_parts import GatewayParts
from antiphon.services.gateway.path.guest import Running
from antiphon.services.gateway.path.sequence_state import Address, Phase, SequenceState
from antiphon.services.gateway.path.service_clients import PeerUnavailableError
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import SequenceMark


class Repairs:
    """The repairs of one request, `owner`. `place_again` queues a sequence, given by its index, for a new placement."""

    def __init__(self, parts: GatewayParts, owner: Running, place_again: Callable[[int], bool]) -> None:
        self._parts, self._owner, self._place_again = parts, owner, place_again
        self._clients, self._clock = parts.clients, parts.host.clock
        self.running: set[int] = set()
        """Indexes of sequences whose stream is being repaired."""
        self._behind: set[int] = set()
        """Indexes of sequences whose engine has tokens that have not arrived."""
        self._streamless: dict[int, float] = {}
        """Indexes of sequences whose stream no detokenizer accepts, with the time at which this began."""

    def begin(self, index: int, refused: set[Address] | None = None) -> None:
        """Repairs the stream of a running sequence, if that is not being done. `refused`: detokenizers to avoid."""
        if index not in self.running and self._owner.sequences[index].phase is Phase.RUNNING:
            self.running.add(index)
            self._owner.spawn(self._rebuild(index, refused or set()))

    def on_mark(self, index: int, mark: SequenceMark) -> None:
        """Handles an engine's report of the progress of a sequence that runs on it."""
        if self._owner.sequences[index].report_progress(mark, self._clock.monotonic()):
            self._behind.add(index)

    def drop(self, index: int) -> None:
        """Forgets what was wrong with a stream, because its sequence is placed again."""
        self._behind.discard(index)
        self._streamless.pop(index, None)

    def tick(self, now: float) -> None:
        """Repairs streams whose tokens do not arrive, and streams for which there was no detokenizer before."""
        if not self._behind and not self._streamless:
            return
        sequences = self._owner.sequences
        self._behind -= {index for index in self._behind if sequences[index].behind_since is None}
        for index in [index for index in self._behind if sequences[index].stalled(now)]:
            self._behind.discard(index)
            self.begin(index)
        for index, since in list(self._streamless.items()):
            if now - since > limits.QUEUE_WAIT_S:
                message = f"No detokenizer of the model {self._owner.card.served_by!r} is running. Try again shortly."
                self._owner.fail(ServiceError("no_detokenizer", message, retry_after_s=2.0))
                return
            self.begin(index)

    def detokenizer_for(self, sequence: SequenceState, refused: set[Address]) -> Address | None:
        """Returns a detokenizer for a sequence's stream, preferably its present one; None if all are in `refused`."""
        alive = self._parts.members.alive("detokenizer", self._clock.monotonic())
        here = sequence.detokenizer
        if here not in refused and any((d.id, d.instance_id) == here for d in alive):
            return here
        chosen = self._parts.router.choose_detokenizer(alive, self._owner.card.served_by, refused)
        address = Address(chosen.id, chosen.instance_id) if chosen is not None else None
        return None if address in refused else address

    async def _rebuild(self, index: int, refused: set[Address]) -> None:
        try:
            await self._rebuilt(index, refused)
        finally:
            self.running.discard(index)

    async def _rebuilt(self, index: int, refused: set[Address]) -> None:
        """Opens the stream again, preferably on its present detokenizer, and makes the engine send the missing tokens.

        A pooling sequence has no stream: the engine sends its vector again.
        """
        owner, sequence = self._owner, self._owner.sequences[index]
        if owner.request.pooling is not None:
            await self._retarget(index)
            return
        while not owner.over and sequence.phase is Phase.RUNNING:
            detokenizer = self.detokenizer_for(sequence, refused)
            if detokenizer is None:
                self._streamless.setdefault(index, self._clock.monotonic())  # the next tick tries again
                return
            try:
                await self._clients.open_stream(detokenizer, owner.messages.open_stream(index))
            except PeerUnavailableError:
                refused.add(detokenizer)
                continue
            if owner.over or sequence.phase is not Phase.RUNNING:
                await self._clients.close_stream(detokenizer, sequence.sequence_id, sequence.attempt)
                return
            self._streamless.pop(index, None)
            former, attempt = sequence.detokenizer, sequence.attempt
            self._move_stream(sequence, detokenizer)
            owner.request.origin.record.stream_moved(index, detokenizer.id)
            await self._retarget(index)
            if former is not None and former != detokenizer:
                # A draining detokenizer waits for the end of its streams.
                await self._clients.close_stream(former, sequence.sequence_id, attempt)
            return

    def _move_stream(self, sequence: SequenceState, detokenizer: Address) -> None:
        """Records that the stream of a sequence was rebuilt on a detokenizer."""
        if sequence.detokenizer is not None:
            self._parts.router.stream_closed(sequence.detokenizer, sequence.sequence_id)
        self._parts.router.stream_opened(detokenizer, sequence.sequence_id)
        sequence.moved(detokenizer, self._clock.monotonic())

    async def _retarget(self, index: int) -> None:
        owner, sequence = self._owner, self._owner.sequences[index]
        assert sequence.engine is not None
        try:
            await self._clients.retarget(sequence.engine, owner.messages.retarget(index))
        except (PeerUnavailableError, ServiceError):
            self.running.discard(index)
            if sequence.phase is Phase.RUNNING and not owner.over:
                self._place_again(index)
                self._parts.dispatcher.pump()
