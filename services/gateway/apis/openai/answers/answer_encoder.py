"""The interface between the runner of a generation and the format of an API's answers. Only definitions.

`serving` runs a generation and calls an encoder. Each API has its own encoder: OpenAI's is
`stream_encoder.OpenAIEncoder`; those of other APIs are in their packages.
"""

from dataclasses import dataclass
from typing import Protocol

from antiphon.services.gateway.apis.openai.answers.choices import Choice, ChoiceAccumulator
from antiphon.services.gateway.path.generation import Generation
from antiphon.shared.errors import ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationState:
    """What a generation has produced so far, as an encoder needs it.

    Times are in seconds since the arrival of the request. Those of the first and the last token so far are 0 before the
    first token.
    """

    accumulator: ChoiceAccumulator
    num_prompt_tokens: int
    generation: Generation
    time_to_first_token_s: float
    time_to_last_token_s: float
    elapsed_s: float


class AnswerEncoder(Protocol):
    """Encodes the answer to one request, either whole (`whole`) or as a stream (all other methods).

    A stream is `opening`, then `chunk` for the new output of each choice, then `closing`; or, if the request fails
    after the first byte, `failure` at any point.
    """

    @property
    def content_type(self) -> bytes:
        """Content type of the stream. The runner sends comments to keep a connection alive only in event streams."""
        ...

    def whole(self, state: GenerationState) -> bytes:
        """Returns the body of the whole answer. The choices contain their text and events."""
        ...

    def opening(self, state: GenerationState) -> bytes:
        """Returns the beginning of the stream. Called once, when the first output is in `state`, before its chunk."""
        ...

    def chunk(self, choice: Choice, text: str) -> bytes:
        """Returns the new output of a choice; b"" if there is none to send. `text` is not in `choice.text`.

        Output that a parser has separated is in `choice.events` and not in `text`. Only a request with an
        `answer_format` has parsers; its encoder takes the events from the choice.
        """
        ...

    def closing(self, state: GenerationState) -> bytes:
        """Returns the end of the stream. Called once, after the last chunk of every choice."""
        ...

    def failure(self, error: ServiceError) -> bytes:
        """Returns the end of a stream whose request has failed. It must not look like a complete answer."""
        ...


class SnapshotEncoder(AnswerEncoder, Protocol):
    """An encoder whose streams repeat the whole output so far, once for all output that arrived together."""

    def flush(self, state: GenerationState) -> bytes:
        """Returns the output so far. Called after the chunks of output that arrived together."""
        ...


class NumberedEncoder(AnswerEncoder, Protocol):
    """An encoder whose events have consecutive numbers, which clients see."""

    @property
    def next_number(self) -> int:
        """Number of the next event. If the first event has the number 0, this is the number of events so far."""
        ...

    def number_from(self, number: int) -> None:
        """Sets the number of the next event."""
        ...
