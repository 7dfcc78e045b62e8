"""What the choices of a request have come to so far: counts, ends, and what is still to be sent. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.gateway.generation import SequenceUpdate
from shared.errors import ServiceError
from shared.messages import FinishReason, PositionLogprobs


@dataclass(slots=True)
class Choice:
    """One sequence. `text`, `logprobs` and `token_ids` wait here until they are put into the answer."""

    index: int
    num_tokens: int = 0
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0
    num_characters: int = 0
    """Unicode characters of the text generated so far."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs_offset: int = 0
    """Characters of all tokens whose log probabilities were sent."""
    text: list[str] = field(default_factory=list[str])
    logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    token_ids: list[int] | None = None
    """None: nobody asked for them."""

    def add(self, update: SequenceUpdate) -> None:
        """Takes an update in, except its text, which a stream sends at once."""
        self.num_tokens += len(update.token_ids)
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


class ChoiceAccumulator:
    """All choices of a request: index = prompt index * n + choice."""

    def __init__(self, num_prompts: int, n: int, *, keep_token_ids: bool = False) -> None:
        self.n = n
        self.choices = [Choice(index, token_ids=[] if keep_token_ids else None) for index in range(num_prompts * n)]

    def check_complete(self) -> None:
        """Raises ServiceError when a choice has no end: a truncated answer must never look complete."""
        if any(choice.finish_reason is None for choice in self.choices):
            raise ServiceError("internal_error", "The generation ended before it was complete.")

    def usage(self, num_prompt_tokens: int) -> dict[str, Any]:
        """OpenAI's usage object. A prompt counts once, however many choices it has."""
        num_completion = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "total_tokens": num_prompt_tokens + num_completion,
            "completion_tokens": num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens from the cache: what the choice of each prompt found there that found least.

        The others have more from that one.
        """
        choices = self.choices
        groups = (choices[first : first + self.n] for first in range(0, len(choices), self.n))
        found = ([choice.num_cached_tokens for choice in group if choice.num_tokens] for group in groups)
        return sum(min(each, default=0) for each in found)


def merge(batch: list[SequenceUpdate]) -> Iterable[SequenceUpdate]:
    """At most one update for each sequence: what piled up behind a slow client becomes one chunk."""
    if len(batch) == 1:
        return batch
    merged: dict[int, SequenceUpdate] = {}
    for update in batch:
        earlier = merged.get(update.index)
        merged[update.index] = update if earlier is None else _join(earlier, update)
    return merged.values()


def _join(first: SequenceUpdate, then: SequenceUpdate) -> SequenceUpdate:
    assert first.finish_reason is None, first.index
    return SequenceUpdate(
        index=first.index,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        text_offset=first.text_offset,
        finish_reason=then.finish_reason,
        stop_reason=then.stop_reason,
        num_cached_tokens=max(first.num_cached_tokens, then.num_cached_tokens),
        cumulative_logprob=then.cumulative_logprob,
    )
