"""Gives each event of a stream an id that says where the stream goes on behind it, and leaves out what a client has."""

from collections.abc import Callable

from services.gateway.generation import SequenceUpdate
from services.gateway.http import sse
from services.gateway.openai.answer_encoder import AnswerEncoder, GenerationState
from services.gateway.openai.choices import Choice, merge
from services.gateway.streams.cut import ALL, Piece, SequenceCut
from services.gateway.streams.position import START, Part, Position, Shown
from shared.errors import ServiceError

Take = Callable[[SequenceUpdate], tuple[Choice, str]]
"""Adds an update to its choice. Returns the choice, and the text that no parser takes."""


class PositionedEvents:
    """The events of one stream. Implements `response_runner.StreamEvents` with an encoder's methods.

    Every event of a choice is encoded by itself: its id says up to where each choice has been shown. Output that gives
    no event, such as the beginning of a tag that a parser waits for, counts as shown with the next event.
    """

    def __init__(
        self,
        request_id: str,
        num_sequences: int,
        position: Position = START,
        replayed: tuple[tuple[int, ...], ...] = (),
        accepted: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        """`position`: where the client goes on; `replayed` and `accepted`: see SequenceCut, for each sequence.

        Raises ServiceError('invalid_value') if the position is of another number of sequences.
        """
        if position.shown and len(position.shown) != num_sequences:
            told = f"The position is of {len(position.shown)} choices. The stream has {num_sequences}."
            raise ServiceError("invalid_value", told, param="from")
        self._head = b"id: " + request_id.encode() + b":"
        self._position = position
        self._fed = [Shown()] * num_sequences
        self._shown = [Shown().text()] * num_sequences
        self._cuts: list[SequenceCut] | None = None
        if position != START or any(accepted):
            nothing = ((),) * num_sequences
            self._cuts = [
                SequenceCut(index, replayed_of, accepted_of, position)
                for index, (replayed_of, accepted_of) in enumerate(
                    zip(replayed or nothing, accepted or nothing, strict=True)
                )
            ]

    def opening(self, encoder: AnswerEncoder, state: GenerationState) -> bytes:
        """Returns the events before the output. Called once."""
        known = self._position.opening if self._position.before_output else ALL
        return self._numbered(b"o", encoder.opening(state), known)

    def output(self, encoder: AnswerEncoder, batch: list[SequenceUpdate], take: Take) -> bytes:
        """Returns the events of new output. Raises ServiceError, see `SequenceCut.push`."""
        parts: list[bytes] = []
        for update in merge(batch):
            pieces = [Piece(update)] if self._cuts is None else self._cuts[update.index].push(update)
            for piece, num_known in pieces:
                choice, text = take(piece)
                before = self._fed[piece.index]
                fed = self._fed[piece.index] = Shown(
                    before.num_tokens + len(piece.token_ids),
                    before.num_chars + len(piece.text),
                    piece.finish_reason is not None,
                )
                if data := encoder.chunk(choice, text):
                    parts.append(self._stamped(data, piece.index, fed, num_known))
        return b"".join(parts)

    def closing(self, encoder: AnswerEncoder, state: GenerationState) -> bytes:
        """Returns the events after the output. Called once."""
        return self._numbered(b"c", encoder.closing(state), self._position.closing)

    def _numbered(self, letter: bytes, data: bytes, num_known: int) -> bytes:
        events = sse.split_events(data)
        return b"".join([
            self._head + letter + b"%d\n" % number + event
            for number, event in enumerate(events, start=1)
            if number > num_known
        ])  # fmt: skip

    def _stamped(self, data: bytes, index: int, fed: Shown, num_known: int) -> bytes:
        """Returns the events of one choice with their ids, without the first `num_known`."""
        before = ",".join(self._shown)
        self._shown[index] = fed.text()
        last = self._head + ",".join(self._shown).encode() + b"\n"
        if num_known == 0 and data.count(sse.END) == 1:
            return last + data
        events = sse.split_events(data)
        parts: list[bytes] = []
        for number, event in enumerate(events, start=1):
            if number > num_known:
                part = Part(index, fed, number)
                inner = f"{before}-{part.index}.{part.until.text()}.{part.num_events}"
                parts.append((last if number == len(events) else self._head + inner.encode() + b"\n") + event)
        return b"".join(parts)
