"""Splits the regenerated output of a sequence at the position up to which the client has received it. Pure."""

from typing import NamedTuple

from msgspec.structs import replace

from antiphon.services.gateway.apis.openai.answers.choices import joined_updates
from antiphon.services.gateway.guests.resume.position import Position, Shown
from antiphon.services.gateway.path.generation import SequenceUpdate
from antiphon.shared.errors import ServiceError

ALL = 2**31
"""As `Piece.num_known`: the client has all events of the piece."""


class Piece(NamedTuple):
    """Output of a sequence, and how many of its first events the client has already received."""

    update: SequenceUpdate
    num_known: int = 0


class _Goal(NamedTuple):
    shown: Shown
    num_known: int


class SequenceCut:
    """Splits the output of one sequence. `replayed`: tokens that the engine got as earlier output and does not repeat.

    `accepted`: all tokens of the former run. Tokens that are computed again must be the same. `num_cached`: the former
    run's number of cached tokens, which its output keeps, because this run finds the former run's work in the cache;
    None if it is unknown.
    """

    def __init__(
        self,
        index: int,
        replayed: tuple[int, ...],
        accepted: tuple[int, ...],
        position: Position,
        num_cached: int | None = None,
    ) -> None:
        self._index = index
        self._num_cached = num_cached
        self._accepted = accepted
        self._goals = _goals(index, position)
        self._checked = len(replayed)
        self._done = Shown()
        self._waiting = SequenceUpdate(index=index, text="", token_ids=replayed) if replayed else None

    def push(self, update: SequenceUpdate) -> list[Piece]:
        """Returns the pieces that are complete with an update.

        Raises ServiceError: 'engine_failure' if it contradicts the former run, 'invalid_value' if the sequence ends
        before the client's position.
        """
        self._check(update)
        if self._num_cached is not None:
            update = replace(update, num_cached_tokens=self._num_cached)
        waiting = update if self._waiting is None else joined_updates(self._waiting, update)
        self._waiting = None
        pieces: list[Piece] = []
        while self._goals:
            goal = self._goals[0]
            num_tokens = goal.shown.num_tokens - self._done.num_tokens
            num_chars = goal.shown.num_chars - self._done.num_chars
            has_all = len(waiting.token_ids) >= num_tokens and len(waiting.text) >= num_chars
            ended = waiting.finish_reason is not None
            if not has_all or goal.shown.ended > ended:
                if ended:
                    raise beyond_the_end()
                self._waiting = waiting
                return pieces
            self._goals.pop(0)
            if goal.shown.ended:
                return [*pieces, Piece(waiting, goal.num_known)]
            head, waiting = _divided(waiting, num_tokens, num_chars)
            self._done = goal.shown
            pieces.append(Piece(head, goal.num_known))
        if waiting.text or waiting.token_ids or waiting.finish_reason is not None or not pieces:
            pieces.append(Piece(waiting))
        return pieces

    def _check(self, update: SequenceUpdate) -> None:
        end = self._checked + len(update.token_ids)
        known = self._accepted[self._checked : end]
        if update.token_ids[: len(known)] != known:
            text = "The output that was computed again differs from what the stream has shown. Send the request again."
            raise ServiceError("engine_failure", text)
        self._checked = end


def beyond_the_end() -> ServiceError:
    """Returns the error for a position after the end of the stream."""
    message = "The position is behind the end of the stream. Send the id of the last event that has arrived."
    return ServiceError("invalid_value", message, param="from")


def _goals(index: int, position: Position) -> list[_Goal]:
    if position.closing:
        return [_Goal(Shown(ended=True), ALL)]
    if position.before_output:
        return []
    shown, part = position.shown[index], position.part
    goals = [_Goal(shown, ALL)] if shown != Shown() else []
    if part is not None and part.index == index:
        goals.append(_Goal(part.until, part.num_events))
    return goals


def _divided(update: SequenceUpdate, num_tokens: int, num_chars: int) -> tuple[SequenceUpdate, SequenceUpdate]:
    head = replace(
        update,
        text=update.text[:num_chars],
        token_ids=update.token_ids[:num_tokens],
        logprobs=update.logprobs[:num_tokens],
        finish_reason=None,
        stop_reason=None,
    )
    rest = replace(
        update,
        text=update.text[num_chars:],
        token_ids=update.token_ids[num_tokens:],
        logprobs=update.logprobs[num_tokens:],
        text_offset=update.text_offset + num_chars,
    )
    return head, rest
