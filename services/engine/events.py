"""Converts the core's outcome of a step for one sequence to the bus message type `TokenEvent`. No I/O."""

from services.engine.core.plan import SampledLogprobs
from services.engine.core.request import Outcome
from shared.messages import TokenEvent, TokenLogprobs, TopLogprob


def token_event(outcome: Outcome, sequence_id: str, attempt: int) -> TokenEvent:
    """Returns the event of one outcome. The outcome's own id is the core's, which combines sequence id and attempt."""
    return TokenEvent(
        sequence_id,
        attempt,
        outcome.position,
        outcome.token_ids,
        outcome.finish_reason,
        outcome.stop_token_id,
        tuple(map(_logprobs, outcome.logprobs)),
        outcome.num_cached_tokens,
        outcome.cumulative_logprob,
        vector=outcome.vector,
    )


def _logprobs(sampled: SampledLogprobs) -> TokenLogprobs:
    top = zip(sampled.top_token_ids, sampled.top_logprobs, strict=True)
    return TokenLogprobs(sampled.logprob, tuple(TopLogprob(i, p) for i, p in top))
