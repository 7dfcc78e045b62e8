"""What the core is told about a sequence, and what it tells of one."""

from dataclasses import dataclass

import msgspec

from services.engine.core.plan import SampledLogprobs
from shared.messages import FinishReason
from shared.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A sequence to run. `output_token_ids` were generated elsewhere and count as output.

    `block_hashes` are those of the full blocks of prompt + output so far, or shorter, or empty: the core computes what
    is missing. `arrival` orders the queue within a priority (lower runs first).
    """

    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    block_hashes: tuple[bytes, ...] = ()
    cache_salt: bytes = b""
    priority: int = 0
    arrival: int = 0
    family: str = ""
    """Sequences of one family (and one salt) that run at the same time share what they have in common."""


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What a step gave one sequence: tokens at output positions [position, position + len(token_ids))."""

    sequence_id: str
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledLogprobs, ...] = ()
    """Parallel to `token_ids` if the sequence asked for log probabilities, else empty."""
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    first_scheduled_step: int = 0
