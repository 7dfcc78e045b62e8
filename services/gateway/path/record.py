"""The events of a request that somebody may record: a timeline, if the server keeps one (`ops.timeline`)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from antiphon.shared.messages import UsageOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What is known of a request when it arrives. `key`: name of its API key. `turn_s`: wait for a turn of the key."""

    request_id: str
    model: str
    key: str
    client_request_id: str = ""
    max_tokens: int = 0
    turn_s: float = 0.0
    ignored: Collection[str] = ()
    """Fields of the request without effect."""


class RecordedRequest:
    """The interface through which the gateway adds events. This base class, for requests without record, keeps none.

    `index` is the index of a sequence of the request.
    """

    keeps_content = False
    """Whether `content` is wanted."""

    def follow(self, snapshot: Callable[[], bytes]) -> None:
        """Gives what returns the content so far; b"": it is not known yet. Called when the request begins."""

    def content(self, data: bytes) -> None:
        """What it takes to run the request again (`antiphon.shared.recorded_request`). Called before `ended`."""

    def admitted(self) -> None:
        """The limits of the key let the request pass."""

    def tokenizer_silent(self, name: str, waited_s: float) -> None:
        """A tokenizer has not answered within `waited_s`; `name` is empty if the request went to the queue group."""

    def tokenizer_answered(self, name: str) -> None:
        """A tokenizer has answered; `name` is empty if it did not send its name."""

    def tokenized(self, num_prompt_tokens: int) -> None:
        """The prompts have been converted to token ids."""

    def placed(
        self, index: int, attempt: int, engine: str, detokenizer: str, places: int = 0, block_size: int = 0
    ) -> None:
        """The sequence is sent to an engine.

        `places`: the maximum batch size of the engine. `block_size`: tokens in one of its KV blocks. 0: unknown.
        """

    def accepted(self, index: int, attempt: int) -> None:
        """The engine has confirmed that it accepts the sequence."""

    def lost(self, index: int, attempt: int, reason: str) -> None:
        """The placement has ended before the sequence did, and the sequence waits for another engine."""

    def stream_moved(self, index: int, detokenizer: str) -> None:
        """The stream of text was opened again, perhaps on another detokenizer."""

    def detokenized(self, work_us: int) -> None:
        """A message with text has arrived, on which its detokenizer has worked for `work_us`."""

    def arrived(self, index: int, num_tokens: int) -> None:
        """Output has arrived at the gateway."""

    def written(self, index: int, num_tokens: int) -> None:
        """Output was written to the client's connection, or added to an answer that is not streamed."""

    def ended(
        self, outcome: UsageOutcome, error_code: str, prompt: int, cached: int, generated: int, reasons: tuple[str, ...]
    ) -> None:
        """The request has ended, with these numbers of tokens and the finish reasons of its sequences.

        `error_code`: of the error that it failed with, or who cancelled it (`Generation.cancel`); may be empty.
        """

    def closed(self) -> None:
        """The last bytes of the answer are written, if it is streamed. Called after `ended`."""


NOT_RECORDED = RecordedRequest()
BeginRecord = Callable[[RequestFacts, float], RecordedRequest]
"""Returns the record of a request that begins. The number is when it arrived, monotonic seconds."""


def not_recorded(facts: RequestFacts, received_s: float) -> RecordedRequest:
    """Implements `BeginRecord` for a gateway that records nothing."""
    return NOT_RECORDED
