"""Converts log probabilities to the two formats of OpenAI's API. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.shared.messages import PositionLogprobs, TokenText

LEAST = -9999.0
"""The smallest value in answers. It replaces minus infinity, which JSON does not have."""


def completion_logprobs(
    positions: Sequence[PositionLogprobs], offset: int, *, as_ids: bool = False
) -> tuple[dict[str, Any], int]:
    """Returns the format of completions (parallel lists), and the text offset of the next token.

    `offset`: number of characters before the first position. The token itself is always among the candidates, so there
    may be one more than the request asks for. The first token of an echoed prompt has null. `as_ids`: tokens are
    written as their ids.
    """
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.chosen.token)
    shape = {
        "tokens": [_name(position.chosen, as_ids) for position in positions],
        "token_logprobs": [_clamp(one.chosen.logprob) if _is_known(one) else None for one in positions],
        "top_logprobs": [_candidates(one, as_ids) if _is_known(one) else None for one in positions],
        "text_offset": offsets,
    }
    return shape, offset


def chat_logprobs(positions: Sequence[PositionLogprobs], *, as_ids: bool = False) -> dict[str, Any]:
    """Returns the format of chat: one object for each token, with its bytes. `as_ids`: see completion_logprobs."""
    content = [
        {**_token(one.chosen, as_ids), "top_logprobs": [_token(other, as_ids) for other in one.top]}
        for one in positions
    ]
    return {"content": content}


def prompt_logprobs(positions: Sequence[PositionLogprobs], num_top: int) -> list[dict[str, Any] | None]:
    """Returns vLLM's format for a prompt: for each token the token itself and the `num_top` best ones, by token id.

    The first token has None.
    """
    return [_by_token_id(position, num_top) if _is_known(position) else None for position in positions]


def limited(positions: Sequence[PositionLogprobs], num_top: int) -> list[PositionLogprobs]:
    """Returns the positions with at most `num_top` candidates each."""
    return [msgspec.structs.replace(position, top=position.top[:num_top]) for position in positions]


def _by_token_id(position: PositionLogprobs, num_top: int) -> dict[str, Any]:
    ranks = {position.chosen.token_id: position.rank or None}
    ranks.update((one.token_id, rank) for rank, one in enumerate(position.top, start=1))
    found: dict[str, Any] = {}
    for one in (position.chosen, *position.top[:num_top]):
        about = {"logprob": _clamp(one.logprob), "rank": ranks[one.token_id], "decoded_token": one.token}
        found.setdefault(str(one.token_id), about)
    return found


def _is_known(position: PositionLogprobs) -> bool:
    """Returns whether the token has a log probability: all tokens do but the first of a prompt."""
    return not math.isnan(position.chosen.logprob)


def _candidates(position: PositionLogprobs, as_ids: bool) -> dict[str, float]:
    """Returns the token itself, then the others. Of different token ids with the same text the likeliest is kept."""
    candidates: dict[str, float] = {}
    for one in (position.chosen, *position.top):
        name, logprob = _name(one, as_ids), _clamp(one.logprob)
        candidates[name] = max(logprob, candidates.get(name, logprob))
    return candidates


def _name(one: TokenText, as_ids: bool) -> str:
    return f"token_id:{one.token_id}" if as_ids else one.token


def _token(one: TokenText, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(one, as_ids), "logprob": _clamp(one.logprob), "bytes": list(one.token_bytes)}


def _clamp(logprob: float) -> float:
    return max(logprob, LEAST)
