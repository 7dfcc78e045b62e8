"""Converts log probabilities to the two formats of OpenAI's API. Pure."""

from collections.abc import Sequence
from typing import Any

from shared.messages import PositionLogprobs, TokenText

LEAST = -9999.0
"""The smallest value in answers. It replaces minus infinity, which JSON does not have."""


def completion_logprobs(positions: Sequence[PositionLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """Returns the format of completions (parallel lists), and the text offset of the next token.

    `offset`: number of characters before the first position. The sampled token is always among the candidates, so
    there may be one more than the request asks for.
    """
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.chosen.token)
    shape = {
        "tokens": [position.chosen.token for position in positions],
        "token_logprobs": [_clamp(position.chosen.logprob) for position in positions],
        "top_logprobs": [_candidates(position) for position in positions],
        "text_offset": offsets,
    }
    return shape, offset


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """Returns the format of chat: one object for each token, with its bytes."""
    content = [{**_token(one.chosen), "top_logprobs": [_token(other) for other in one.top]} for one in positions]
    return {"content": content}


def _candidates(position: PositionLogprobs) -> dict[str, float]:
    candidates: dict[str, float] = {}
    for one in (*position.top, position.chosen):
        # Different token ids can have the same text; the most likely one is kept.
        candidates.setdefault(one.token, _clamp(one.logprob))
    return candidates


def _token(one: TokenText) -> dict[str, Any]:
    return {"token": one.token, "logprob": _clamp(one.logprob), "bytes": list(one.token_bytes)}


def _clamp(logprob: float) -> float:
    return max(logprob, LEAST)
