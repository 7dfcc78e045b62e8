"""Log probabilities in the two shapes of OpenAI's API. Pure."""

from collections.abc import Sequence
from typing import Any

from shared.messages import PositionLogprobs, TokenText

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def completion_logprobs(positions: Sequence[PositionLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """The legacy shape: parallel lists. Also returns the offset of what comes next.

    The sampled token is always among the candidates, so there may be one more than was asked for.
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
    """The shape of chat: one object for each token, with its bytes."""
    content = [{**_token(one.chosen), "top_logprobs": [_token(other) for other in one.top]} for one in positions]
    return {"content": content}


def _candidates(position: PositionLogprobs) -> dict[str, float]:
    candidates: dict[str, float] = {}
    for one in (*position.top, position.chosen):
        # Different ids can have the same text: the most likely one stands for it.
        candidates.setdefault(one.token, _clamp(one.logprob))
    return candidates


def _token(one: TokenText) -> dict[str, Any]:
    return {"token": one.token, "logprob": _clamp(one.logprob), "bytes": list(one.token_bytes)}


def _clamp(logprob: float) -> float:
    return max(logprob, LEAST)
