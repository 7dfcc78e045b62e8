"""Opens the text streams of a request's sequences again, and has engines send the tokens that are missing.

A stream is repaired when its detokenizer is lost or drains, when a position is missing, or when an engine has tokens
that did not arrive.
"""

from services.gateway.path.gateway_parts import GatewayParts
from services.gateway.path.guest import Running
from services.gateway.path.requests.places import Places
from services.gateway.path.sequence_state import Address, Phase
from services.gateway.path.service_clients import PeerUnavailableError
from shared import limits
from shared.errors import ServiceError
from shared.messages import SequenceMark


class Repairs:
    """The repairs of one request, which is an argument, so that the two make no reference cycle."""

    def __init__(self, parts: GatewayParts, places: Places) -> None:
        self._parts, self._places = parts, places
        self._clients, self._clock = parts.clients, parts.host.clock
        self.running: set[int] = set()
        """Indexes of sequences whose stream is being repaired."""
        self._behind: set[int] = set()
        """Indexes of sequences whose engine has tokens that have not arrived."""
        self._streamless: dict[int, float] = {}
        """Indexes of sequences whose stream no detokenizer accepts, with the time at which this began."""

    def begin(self, owner: Running, index: int, refused: set[Address] | None = None) -> None:
        """Repairs the stream of a running sequence, if that is not being done. `refused`: detokenizers to avoid."""
        if index not in self.running and owner.sequences[index].phase is Phase.RUNNING:
            self.running.add(index)
            owner.spawn(self._rebuild(owner, index, refused or set()), index)

    def on_mark(self, owner: Running, index: int, mark: SequenceMark) -> None:
        """Handles an engine's report of the progress of a sequence that runs on it."""
        if owner.sequences[index].report_progress(mark, self._clock.monotonic()):
            self._behind.add(index)

    def drop(self, index: int) -> None:
        """Forgets what was wrong with a stream, because its sequence is placed again."""
        self._behind.discard(index)
        self._streamless.pop(index, None)

    def tick(self, owner: Running, now: float) -> None:
        """Repairs streams whose tokens do not arrive, and streams for which there was no detokenizer before."""
        if not self._behind and not self._streamless:
            return
        sequences = owner.sequences
        self._behind -= {index for index in self._behind if sequences[index].behind_since is None}
        for index in [index for index in self._behind if sequences[index].stalled(now)]:
            self._behind.discard(index)
            self.begin(owner, index)
        for index, since in list(self._streamless.items()):
            if now - since > limits.QUEUE_WAIT_S:
                message = f"No detokenizer of the model {owner.card.served_by!r} is running. Try again shortly."
                owner.fail(ServiceError("no_detokenizer", message, retry_after_s=2.0))
                return
            self.begin(owner, index)

    async def _rebuild(self, owner: Running, index: int, refused: set[Address]) -> None:
        """Opens the stream again, preferably on its present detokenizer, and makes the engine send the missing tokens.

        A pooling sequence has no stream: the engine sends its vector again.
        """
        sequence = owner.sequences[index]
        if owner.request.pooling is not None:
            await self._retarget(owner, index)
            return
        while not owner.over and sequence.phase is Phase.RUNNING:
            detokenizer = self._places.detokenizer_for(sequence, refused)
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
            self._places.move_stream(sequence, detokenizer)
            owner.request.origin.record.stream_moved(index, detokenizer.id)
            await self._retarget(owner, index)
            if former is not None and former != detokenizer:
                # A draining detokenizer waits for the end of its streams.
                await self._clients.close_stream(former, sequence.sequence_id, attempt)
            return

    async def _retarget(self, owner: Running, index: int) -> None:
        sequence = owner.sequences[index]
        assert sequence.engine is not None
        try:
            await self._clients.retarget(sequence.engine, owner.messages.retarget(index))
        except (PeerUnavailableError, ServiceError):
            self.running.discard(index)
            if sequence.phase is Phase.RUNNING and not owner.over:
                owner.place_again(index)
                self._parts.dispatcher.pump()
