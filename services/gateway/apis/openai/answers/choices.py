"""Collects the output of a request's choices: counts, finish reasons, and output that is not sent yet. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from antiphon.services.gateway.apis.openai.tools.answer_format import AnswerFormat
from antiphon.services.gateway.apis.parsers.events import Content, Event, joined
from antiphon.services.gateway.apis.parsers.output_parser import OutputParser
from antiphon.services.gateway.path.generation import SequenceUpdate
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import FinishReason, PositionLogprobs
from antiphon.shared.request.choices import best_first


@dataclass(slots=True, kw_only=True)
class Choice:
    """One sequence. `text`, `events`, `logprobs` and `token_ids` hold output until it is put into the answer."""

    index: int
    num_tokens: int = 0
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0
    num_characters: int = 0
    """Number of Unicode characters of the text generated so far, without reasoning and calls if they are separated."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs_offset: int = 0
    """Number of characters of all tokens whose log probabilities were sent."""
    text: list[str] = field(default_factory=list[str])
    logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    token_ids: list[int] | None = None
    """None if the request does not ask for token ids."""
    parser: OutputParser | None = None
    """Separates the parts of the answer; None if the whole output is its text."""
    events: list[Event] = field(default_factory=list[Event])
    """The events of the parser; with a parser, `text` is empty."""

    def add(self, update: SequenceUpdate) -> None:
        """Adds an update, except its text, which a stream sends at once."""
        self.num_tokens += len(update.token_ids)
        if self.parser is None:
            self.num_characters += len(update.text)
        if update.token_ids or update.finish_reason is not None:
            self.cumulative_logprob = update.cumulative_logprob
        if update.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = update.num_cached_tokens
        if update.logprobs:
            self.logprobs += update.logprobs
        if self.token_ids is not None:
            self.token_ids += update.token_ids
        if update.finish_reason is not None:
            self.finish_reason = update.finish_reason
            self.stop_reason = update.stop_reason

    def reason_in(self, answer: AnswerFormat | None) -> str | None:
        """Returns the finish reason to report in an answer of this format, if the choice has ended."""
        if answer is None or self.parser is None or self.finish_reason is None:
            return self.finish_reason
        return answer.finish_reason(self.finish_reason, self.parser)

    def separate(self, update: SequenceUpdate) -> str:
        """Parses the text of an update into `events`; without a parser, returns the text unchanged."""
        if self.parser is None:
            return update.text
        events = self.parser.feed(update.text, len(update.token_ids))
        if update.finish_reason is not None:
            events = joined([*events, *self.parser.finish()])
        self.num_characters += sum(len(event.text) for event in events if isinstance(event, Content))
        self.events += events
        return ""


class ChoiceAccumulator:
    """All sequences of a request. Index = prompt index * num_sequences + choice."""

    def __init__(self, num_prompts: int, num_sequences: int, *, keep_token_ids: bool = False) -> None:
        self._num_sequences = num_sequences
        count = num_prompts * num_sequences
        self.choices = [Choice(index=index, token_ids=[] if keep_token_ids else None) for index in range(count)]
        self.prompts = [list[PositionLogprobs]() for _ in range(num_prompts)]
        """The log probabilities of each prompt, if the request asks for them."""

    def add(self, update: SequenceUpdate) -> Choice:
        """Adds an update, except its text, to its choice or prompt. Returns the choice."""
        choice = self.choices[update.index]
        choice.add(update)
        if update.prompt_logprobs:
            self.prompts[update.index // self._num_sequences] += update.prompt_logprobs
        return choice

    def keep_best(self, n: int) -> None:
        """Keeps, for each prompt, the `n` choices with the highest log probability, highest first.

        If each prompt has only `n` choices, does nothing; they keep their order. All choices must have ended. The kept
        choices get the number of cached tokens of the choice that had the fewest, because that one computed the prompt.
        """
        if n == self._num_sequences:
            return
        kept: list[Choice] = []
        for group in self._groups():
            num_cached = min(choice.num_cached_tokens for choice in group)
            best = best_first([choice.cumulative_logprob for choice in group], n)
            kept += [replace(group[index], num_cached_tokens=num_cached) for index in best]
        self.choices = [replace(choice, index=index) for index, choice in enumerate(kept)]
        self._num_sequences = n

    def check_complete(self) -> None:
        """Raises ServiceError if a choice has no finish reason, so that a truncated answer never looks complete."""
        if any(choice.finish_reason is None for choice in self.choices):
            raise ServiceError("internal_error", "The generation ended before it was complete.")

    def usage(self, num_prompt_tokens: int) -> dict[str, Any]:
        """Returns OpenAI's usage object. A prompt counts once, whatever the number of its choices."""
        num_completion = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "total_tokens": num_prompt_tokens + num_completion,
            "completion_tokens": num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of output tokens that belong to the model's reasoning; 0 if it is not separated."""
        return sum(choice.parser.num_reasoning_tokens for choice in self.choices if choice.parser is not None)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens taken from the prefix cache: for each prompt, the smallest count of its choices.

        The other choices find more in the cache, because that choice has computed the prompt.
        """
        found = ([choice.num_cached_tokens for choice in group if choice.num_tokens] for group in self._groups())
        return sum(min(each, default=0) for each in found)

    def _groups(self) -> Iterator[list[Choice]]:
        """Returns the choices of each prompt."""
        for first in range(0, len(self.choices), self._num_sequences):
            yield self.choices[first : first + self._num_sequences]


def merge(batch: list[SequenceUpdate]) -> Iterable[SequenceUpdate]:
    """Joins the updates of each sequence to one, so that a slow client gets its backlog as one chunk per sequence."""
    if len(batch) == 1:
        return batch
    merged: dict[int, SequenceUpdate] = {}
    for update in batch:
        earlier = merged.get(update.index)
        merged[update.index] = update if earlier is None else joined_updates(earlier, update)
    return merged.values()


def without_output(update: SequenceUpdate) -> SequenceUpdate:
    """Returns the update without its token, which was generated only because the prompt had to be computed."""
    return SequenceUpdate(
        index=update.index,
        text="",
        finish_reason=None if update.finish_reason is None else "length",
        num_cached_tokens=update.num_cached_tokens,
        prompt_logprobs=update.prompt_logprobs,
    )


def joined_updates(first: SequenceUpdate, then: SequenceUpdate) -> SequenceUpdate:
    """Joins two successive updates of a sequence. The first must not be the sequence's last update."""
    assert first.finish_reason is None, first.index
    return structs.replace(
        then,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        text_offset=first.text_offset,
        num_cached_tokens=max(first.num_cached_tokens, then.num_cached_tokens),
        prompt_logprobs=first.prompt_logprobs + then.prompt_logprobs,
    )
