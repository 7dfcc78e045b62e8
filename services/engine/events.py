"""What a step gave a sequence, as the event that makes its text: from the core's words to those of the bus. Pure."""

from services.engine.core.plan import SampledLogprobs
from services.engine.core.request import Outcome
from shared.messages import TokenEvent, TokenLogprobs, TopLogprob


def token_event(outcome: Outcome, sequence_id: str, attempt: int) -> TokenEvent:
    """The event of one outcome. The core knows each attempt under a name of its own, so both parts are given."""
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
    )


def _logprobs(sampled: SampledLogprobs) -> TokenLogprobs:
    top = zip(sampled.top_token_ids, sampled.top_logprobs, strict=True)
    return TokenLogprobs(sampled.logprob, tuple(TopLogprob(i, p) for i, p in top))
