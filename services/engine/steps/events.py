"""Converts the core's outcome of a step for one sequence to bus messages of type `TokenEvent`. No I/O."""

from collections.abc import Iterator

import msgspec

from antiphon.services.engine.core.plan import SampledLogprobs
from antiphon.services.engine.core.request import Outcome
from antiphon.shared import limits
from antiphon.shared.codec import TOKEN_BYTES
from antiphon.shared.messages import PromptLogprobs, TokenEvent, TokenLogprobs, TopLogprob


def token_events(outcome: Outcome, sequence_id: str, attempt: int) -> list[TokenEvent]:
    """Returns the events of one outcome: parts of the prompt's log probabilities, if any, then the tokens.

    The id in the outcome is the core's, which combines sequence id and attempt.
    """
    prompt = [
        TokenEvent(
            sequence_id=sequence_id, attempt=attempt, position=outcome.position, token_ids=(), prompt_logprobs=part
        )
        for part in _prompt_parts(outcome)
    ]
    tokens = TokenEvent(
        sequence_id=sequence_id,
        attempt=attempt,
        position=outcome.position,
        token_ids=outcome.token_ids,
        finish_reason=outcome.finish_reason,
        stop_token_id=outcome.stop_token_id,
        logprobs=tuple(map(_logprobs, outcome.logprobs)),
        num_cached_tokens=outcome.num_cached_tokens,
        cumulative_logprob=outcome.cumulative_logprob,
        vector=outcome.vector,
    )
    return [*prompt, tokens]


def _prompt_parts(outcome: Outcome) -> Iterator[PromptLogprobs]:
    """Returns the log probabilities of the prompt in parts of at most `PROMPT_LOGPROBS_TOKENS_MAX` tokens."""
    size = limits.PROMPT_LOGPROBS_TOKENS_MAX * TOKEN_BYTES  # as many float32 values have the same size
    for part in outcome.prompt_logprobs:
        for first in range(0, len(part.token_ids), size):
            own, top = slice(first, first + size), slice(first * part.num_top, (first + size) * part.num_top)
            yield msgspec.structs.replace(
                part,
                start=part.start + first // TOKEN_BYTES,
                token_ids=part.token_ids[own],
                logprobs=part.logprobs[own],
                ranks=part.ranks[own],
                top_token_ids=part.top_token_ids[top],
                top_logprobs=part.top_logprobs[top],
            )


def _logprobs(sampled: SampledLogprobs) -> TokenLogprobs:
    top = zip(sampled.top_token_ids, sampled.top_logprobs, strict=True)
    return TokenLogprobs(sampled.logprob, tuple(TopLogprob(i, p) for i, p in top))
