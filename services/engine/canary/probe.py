"""The canary, a test that each engine runs periodically and no client sees; comparison of its results. Pure.

The prompt's token ids are spread over the vocabulary. The sequence is greedy, and each of its log probabilities depends
on the logits of the whole vocabulary, and so on every layer and every row of the language model head. For a model
without a head the result is a vector.

On a backend that is batch invariant, a result must equal the golden value (the expected result, computed at start) to
the last bit. On any other backend, log probabilities may differ by up to `TOLERANCE`, and a token may differ if the
golden value has two candidates within twice that tolerance.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.services.engine.core.plan import EngineFacts
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.shared.parameters.sampling import SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 16, 4
TOLERANCE = 0.5
"""Maximum difference of a log probability that a different order of summation can cause. Logits between 16 and 32 have
steps of 0.125 in bfloat16; the rest is margin, because a sound engine must never be ended.
"""
SALT = b"\0canary"
CANARY_ID = "#canary"
"""Prefix of the sequence's id in the core. Ids of requests end in '#' and a number."""
_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The result of a run of the canary.

    `gaps`: difference of log probability between best and second-best token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...] = ()
    vector: bytes = b""
    failed: bool = False
    """Whether a token could not be sampled, for example because logits were not numbers."""


def probe_spec(facts: EngineFacts, number: int, max_model_len: int) -> SequenceSpec | None:
    """Returns the sequence for run `number`; None if the model's context has no room for two tokens."""
    num_output = min(OUTPUT_TOKENS, max_model_len - 1)
    num_prompt = min(PROMPT_TOKENS, max_model_len - num_output)
    if num_prompt < 1 or num_output < 1:
        return None
    stride = max(1, facts.vocab_size // num_prompt)
    prompt = tuple((stride // 2 + index * stride) % facts.vocab_size for index in range(num_prompt))
    params = SamplingParams(
        max_tokens=num_output, temperature=0.0, ignore_eos=True, logprobs=2 if facts.variant_because else 0
    )
    pooling = None if facts.generates else facts.own_pooling()
    return SequenceSpec(
        sequence_id=f"{CANARY_ID}-{number}",
        prompt_token_ids=prompt,
        params=params,
        cache_salt=SALT,
        pooling=pooling,
        canary=True,
    )


def observed(outcomes: Sequence[Outcome]) -> Observed:
    """Joins the tokens, log probabilities and vectors of all sequences of one self-test into one result."""
    entries = [entry for outcome in outcomes for entry in outcome.logprobs]
    return Observed(
        token_ids=tuple(token for outcome in outcomes for token in outcome.token_ids),
        logprobs=tuple(entry.logprob for entry in entries),
        gaps=tuple(entry.top_logprobs[0] - entry.top_logprobs[1] for entry in entries if len(entry.top_logprobs) > 1),
        vector=b"".join(outcome.vector for outcome in outcomes),
        failed=any(outcome.finish_reason == "error" for outcome in outcomes),
    )


def difference(golden: Observed, seen: Observed, *, exact: bool) -> str:
    """Describes how a result differs from the golden one; empty if it does not."""
    if seen.failed:
        return "no token could be sampled"
    if exact and golden.vector != seen.vector:
        return "the vector of the test prompt has changed"
    if len(golden.token_ids) != len(seen.token_ids) or len(golden.logprobs) != len(seen.logprobs):
        return f"{len(seen.token_ids)} tokens instead of {len(golden.token_ids)}"
    return _first_difference(golden, seen, exact=exact)


def digest(golden: Observed, *, exact: bool) -> str:
    """Returns 16 hexadecimal digits, which are equal for engines of equal configuration and weights.

    On a backend without bit-equal results they cover the token ids only.
    """
    hashed = hashlib.sha256(struct.pack(f"<{len(golden.token_ids)}q", *golden.token_ids))
    if exact:
        hashed.update(_bits(golden.logprobs) + golden.vector)
    return hashed.hexdigest()[:_DIGITS]


def _first_difference(golden: Observed, seen: Observed, *, exact: bool) -> str:
    for position, (token, logprob) in enumerate(zip(golden.token_ids, golden.logprobs, strict=True)):
        other, value = seen.token_ids[position], seen.logprobs[position]
        if token != other:
            if not exact and position < len(golden.gaps) and golden.gaps[position] < 2 * TOLERANCE:
                return ""  # either token is acceptable, and the following ones cannot be compared
            return f"token {other} instead of {token} at position {position}"
        same = _bits((logprob,)) == _bits((value,)) if exact else abs(logprob - value) <= TOLERANCE
        if not same:
            return f"log probability {value!r} instead of {logprob!r} at position {position}"
    return ""


def _bits(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)
