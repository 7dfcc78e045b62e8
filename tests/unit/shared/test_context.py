"""Truncation of prompts."""

import pytest

from shared.parameters.context import truncated

PROMPT = (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("keep", "max_tokens", "max_model_len", "kept"),
    [
        (0, 3, 4, PROMPT),
        (2, 3, 100, (4, 5)),
        (5, 3, 100, PROMPT),
        (9, 3, 100, PROMPT),
        (-1, 3, 7, (2, 3, 4, 5)),
        (-1, 3, 100, PROMPT),
        (-1, 0, 4, (3, 4, 5)),
        (-1, 100, 4, (5,)),
        (-1, 3, 0, PROMPT),
    ],
)
def test_the_last_tokens_are_kept(keep: int, max_tokens: int, max_model_len: int, kept: tuple[int, ...]) -> None:
    assert truncated(PROMPT, keep, max_tokens, max_model_len) == kept
