"""Gives each event of a stream an id with the position after it, and omits events that the client already has."""

from collections.abc import Callable
from typing import cast

from antiphon.services.gateway.apis.openai.answers.answer_encoder import AnswerEncoder, GenerationState, NumberedEncoder
from antiphon.services.gateway.apis.openai.answers.choices import Choice, merge
from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.guests.resume.cut import ALL, SequenceCut
from antiphon.services.gateway.guests.resume.position import START, Part, Position, Shown
from antiphon.services.gateway.path.generation import SequenceUpdate
from antiphon.shared.errors import ServiceError

Take = Callable[[SequenceUpdate], tuple[Choice, str]]
"""Adds an update to its choice. Returns the choice, and its text if it has no parser."""


_ENDED = b"e\n"
"""End of the position of a sequence that has ended."""


class PositionedEvents:
    """The events of one stream, which an encoder makes.

    Each event of a choice is encoded separately; its id has the position of every choice. The tokens of output that
    gives no event yet, such as the beginning of a tag, belong to the next event. If events have numbers, ids contain
    them too, and a resumed stream continues with the client's number.
    """

    def __init__(
        self,
        request_id: str,
        num_sequences: int,
        position: Position = START,
        replayed: tuple[tuple[int, ...], ...] = (),
        accepted: tuple[tuple[int, ...], ...] = (),
        num_cached: tuple[int | None, ...] = (),
    ) -> None:
        """`position`: the client's position. The others: see SequenceCut, one for each sequence.

        Raises ServiceError('invalid_value') if the position has a different number of sequences.
        """
        if position.shown and len(position.shown) != num_sequences:
            message = f"The position is of {len(position.shown)} choices. The stream has {num_sequences}."
            raise ServiceError("invalid_value", message, param="from")
        self._head = b"id: " + request_id.encode() + b":"
        self._position = position
        self._num_chars = [0] * num_sequences
        """Characters of each sequence that were passed to the encoder."""
        self._shown = [b"0.0"] * num_sequences
        """The position of each sequence at its last event."""
        self._is_plain = False
        """Whether there is one sequence, and events have no numbers."""
        self._shown_plain = 0, 0
        """If `_is_plain`, tokens and characters at the last event, which `_shown` then does not have."""
        self._numbers: NumberedEncoder | None = None
        """The encoder, if its events have numbers."""
        self._starts_at = -1 if position.number is None else position.number
        """Number of events that the client has; -1 if the numbers of further events need not be set."""
        self._cuts: list[SequenceCut] | None = None
        if position != START or any(accepted):
            nothing, unknown = ((),) * num_sequences, (None,) * num_sequences
            former = zip(replayed or nothing, accepted or nothing, num_cached or unknown, strict=True)
            self._cuts = [
                SequenceCut(index, replayed_of, accepted_of, position, num_cached_of)
                for index, (replayed_of, accepted_of, num_cached_of) in enumerate(former)
            ]

    def opening(self, encoder: AnswerEncoder, state: GenerationState) -> bytes:
        """Returns the events before the output. Called once. Raises ServiceError('invalid_value')."""
        self._numbers = cast(NumberedEncoder, encoder) if hasattr(encoder, "number_from") else None
        self._is_plain = self._numbers is None and len(self._shown) == 1
        is_numbered = self._position.number is not None
        if self._position != START and is_numbered != (self._numbers is not None):
            message = "does not have" if is_numbered else "has"
            raise ServiceError(
                "invalid_value", f"The stream {message} numbers of events ('@') in its positions.", param="from"
            )
        known = self._position.opening if self._position.before_output else ALL
        self._start(known)
        return self._with_ids(b"o", encoder.opening(state), known)

    def output(self, encoder: AnswerEncoder, batch: list[SequenceUpdate], take: Take) -> bytes:
        """Returns the events of new output. Raises ServiceError, see `SequenceCut.push`."""
        if self._cuts is None:
            if len(batch) == 1:
                return self._encoded(encoder, batch[0], take)
            return b"".join([self._encoded(encoder, update, take) for update in merge(batch)])
        parts: list[bytes] = []
        for update in merge(batch):
            for piece, num_known in self._cuts[update.index].push(update):
                parts.append(self._encoded(encoder, piece, take, num_known))
        return b"".join(parts)

    def updates(self, batch: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Returns new output with the tokens that the run continues, for an answer without events."""
        if self._cuts is None:
            return batch
        return [piece for update in merge(batch) for piece, _ in self._cuts[update.index].push(update)]

    def closing(self, encoder: AnswerEncoder, state: GenerationState) -> bytes:
        """Returns the events after the output. Called once."""
        self._start(self._position.closing)
        return self._with_ids(b"c", encoder.closing(state), self._position.closing)

    def _start(self, num_known: int) -> None:
        """Sets the number of the next event, of which the client has the first `num_known`. Works once."""
        if self._numbers is not None and self._starts_at >= 0 and num_known != ALL:
            self._numbers.number_from(max(0, self._starts_at - num_known))
            self._starts_at = -1

    def _mark(self, num_later: int = 0) -> bytes:
        """Returns the position part of an event's id. `num_later`: number of events encoded after it."""
        return b"\n" if self._numbers is None else b"@%d\n" % (self._numbers.next_number - num_later)

    def _with_ids(self, letter: bytes, data: bytes, num_known: int) -> bytes:
        if not data:
            return b""
        events = sse.split_events(data)
        return b"".join([
            self._head + letter + b"%d" % number + self._mark(len(events) - number) + event
            for number, event in enumerate(events, start=1)
            if number > num_known
        ])  # fmt: skip

    def _encoded(self, encoder: AnswerEncoder, update: SequenceUpdate, take: Take, num_known: int = 0) -> bytes:
        """Returns the events of an update with their ids, without the first `num_known`. On the token path."""
        if self._starts_at >= 0:
            self._start(num_known)
        choice, text = take(update)
        index, num_tokens = update.index, choice.num_tokens
        num_chars = self._num_chars[index] = self._num_chars[index] + len(update.text)
        data = encoder.chunk(choice, text)
        if not data:
            return b""
        ended = update.finish_reason is not None
        if num_known or not sse.is_one_event(data):
            return self._several(data, Part(index, Shown(num_tokens, num_chars, ended), num_known))
        if self._is_plain:
            self._shown_plain = num_tokens, num_chars
            return b"%b%d.%d%b%b" % (self._head, num_tokens, num_chars, _ENDED if ended else b"\n", data)
        self._shown[index] = b"%d.%d%b" % (num_tokens, num_chars, b"e" if ended else b"")
        return self._head + b",".join(self._shown) + self._mark() + data

    def _several(self, data: bytes, known: Part) -> bytes:
        """Returns several events of one sequence with their ids, without those that are known."""
        before = b"%d.%d" % self._shown_plain if self._is_plain else b",".join(self._shown)
        until = known.until.text().encode()
        self._shown[known.index] = until
        self._shown_plain = known.until.num_tokens, known.until.num_chars
        events = sse.split_events(data)
        parts: list[bytes] = []
        for number, event in enumerate(events, start=1):
            if number > known.num_events:
                inner = before + b"-%d.%b.%d" % (known.index, until, number)
                where = b",".join(self._shown) if number == len(events) else inner
                parts.append(self._head + where + self._mark(len(events) - number) + event)
        return b"".join(parts)
