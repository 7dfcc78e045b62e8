"""Puts the receipt into an answer: a member of the whole answer, or an event of its own near the end of a stream."""

from collections.abc import Callable
from typing import Any, cast

import msgspec

from antiphon.services.gateway.apis.openai.answers.answer_encoder import AnswerEncoder, GenerationState, NumberedEncoder
from antiphon.services.gateway.apis.openai.answers.choices import Choice
from antiphon.services.gateway.edge.http import sse
from antiphon.shared.errors import ServiceError

EVENT = "antiphon.receipt"
"""Name of the event, in APIs whose events have names."""
Members = Callable[[], dict[str, Any]]
"""Returns the receipt as members of a JSON object. Called once, when the output has ended."""


class ReceiptEncoder:
    """The encoder of an API's answers, with receipts. `opening`: members of a chunk, if the API's events have no names.

    An event without a name comes last before the end of the stream, and one with a name last before the API's own last
    event, because clients stop reading there. If events are numbered, it comes first after the output.
    """

    def __init__(self, inner: AnswerEncoder, members: Members, chunk: dict[str, Any] | None) -> None:
        self._inner, self._members, self._chunk = inner, members, chunk
        self._numbers = cast(NumberedEncoder, inner) if hasattr(inner, "number_from") else None

    def __getattr__(self, name: str) -> Any:
        """Returns what only some encoders have (`SnapshotEncoder`, `NumberedEncoder`), from the one inside."""
        return getattr(self._inner, name)

    @property
    def content_type(self) -> bytes:
        """See AnswerEncoder."""
        return self._inner.content_type

    def whole(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        body, members = self._inner.whole(state), msgspec.json.encode(self._members())
        assert body.endswith(b"}"), "the answer is no JSON object"
        return b"%b,%b" % (body[:-1], members[1:])

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return self._inner.opening(state)

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerEncoder."""
        return self._inner.chunk(choice, text)

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        if (numbers := self._numbers) is not None:
            number = numbers.next_number
            numbers.number_from(number + 1)
            return self._named(sequence_number=number) + self._inner.closing(state)
        *before, last = sse.split_events(self._inner.closing(state))
        if self._chunk is None:
            return b"".join((*before, self._named(), last))
        return b"".join((*before, sse.event(msgspec.json.encode({**self._chunk, **self._members()})), last))

    def failure(self, error: ServiceError) -> bytes:
        """See AnswerEncoder. What was not finished has no receipt."""
        return self._inner.failure(error)

    def _named(self, **fields: Any) -> bytes:
        return sse.named_event(EVENT.encode(), msgspec.json.encode({"type": EVENT, **self._members(), **fields}))
