"""Converts log probabilities to the two formats of OpenAI's API. Pure."""

from collections.abc import Sequence
from typing import Any

from shared.messages import PositionLogprobs, TokenText

LEAST = -9999.0
"""The smallest value in answers. It replaces minus infinity, which JSON does not have."""


def completion_logprobs(
    positions: Sequence[PositionLogprobs], offset: int, *, as_ids: bool = False
) -> tuple[dict[str, Any], int]:
    """Returns the format of completions (parallel lists), and the text offset of the next token.

    `offset`: number of characters before the first position. The sampled token is always among the candidates, so
    there may be one more than the request asks for. `as_ids`: tokens are written as their ids.
    """
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.chosen.token)
    shape = {
        "tokens": [_name(position.chosen, as_ids) for position in positions],
        "token_logprobs": [_clamp(position.chosen.logprob) for position in positions],
        "top_logprobs": [_candidates(position, as_ids) for position in positions],
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


def _candidates(position: PositionLogprobs, as_ids: bool) -> dict[str, float]:
    candidates: dict[str, float] = {}
    for one in (*position.top, position.chosen):
        # Different token ids can have the same text; the most likely one is kept.
        candidates.setdefault(_name(one, as_ids), _clamp(one.logprob))
    return candidates


def _name(one: TokenText, as_ids: bool) -> str:
    return f"token_id:{one.token_id}" if as_ids else one.token


def _token(one: TokenText, as_ids: bool) -> dict[str, Any]:
    return {"token": _name(one, as_ids), "logprob": _clamp(one.logprob), "bytes": list(one.token_bytes)}


def _clamp(logprob: float) -> float:
    return max(logprob, LEAST)
