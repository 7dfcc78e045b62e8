"""Decides whether a sequence ends at a generated token: end token, stop token or length.

Stop strings are handled by the detokenizer and aborts by `core`. Called by `core` for every sampled token.
"""

from dataclasses import dataclass
from typing import Literal

from antiphon.shared.parameters.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason for which a sequence ends at a token.

    `stop_token_id` is set if one of the request's own stop tokens ended it.
    """

    reason: Literal["stop", "length"]
    stop_token_id: int | None = None


_END = Verdict("stop")
_LENGTH = Verdict("length")


@dataclass(frozen=True, slots=True)
class StopRules:
    """The stop conditions of one sequence."""

    eos_token_ids: frozenset[int]
    """The end tokens that apply to the sequence; empty if the request ignores them."""
    stop_token_ids: frozenset[int]
    min_tokens: int
    """Number of output tokens that must come before an end or stop token takes effect."""
    max_tokens: int
    """Maximum number of output tokens: the request's limit or, if lower, the rest of the context."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """All tokens that end the sequence once `min_tokens` tokens came before them."""
        return self.eos_token_ids | self.stop_token_ids

    def forbids(self, token_id: int, position: int) -> bool:
        """Returns whether the token is forbidden at `position` (from 0), because it would end the output too early."""
        return position < self.min_tokens and token_id in self.end_token_ids

    def verdict(self, token_id: int, position: int) -> Verdict | None:
        """Returns the verdict for the output token at `position` (from 0); None if the sequence continues.

        A token that is both an end token and a stop token counts as the end token.
        """
        if position >= self.min_tokens:
            if token_id in self.eos_token_ids:
                return _END
            if token_id in self.stop_token_ids:
                return Verdict("stop", token_id)
        return _LENGTH if position + 1 >= self.max_tokens else None


def rules_for(
    params: SamplingParams, num_prompt_tokens: int, max_model_len: int, eos_token_ids: frozenset[int]
) -> StopRules:
    """Returns the rules of a sequence whose prompt and output together may have `max_model_len` tokens.

    `eos_token_ids`: the model's end tokens. A grammar allows an end token only after a complete output, and then
    nothing else, so the sequence ends there in spite of `min_tokens` and `ignore_eos`. Output of a free grammar
    (`Grammar.is_free`) can always continue, so the worker does not sample an end token before `min_tokens`.
    """
    grammar = params.grammar
    return StopRules(
        eos_token_ids=params.effective_end_ids(eos_token_ids)
        | (eos_token_ids if grammar is not None else frozenset[int]()),
        stop_token_ids=frozenset(params.stop_token_ids),
        min_tokens=params.min_tokens if grammar is None or grammar.is_free else 0,
        max_tokens=min(params.max_tokens, max_model_len - num_prompt_tokens),
    )
