"""Truncation of prompts, and the size of texts."""

import pytest

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.context import check_text_size, num_bytes, text_bytes_max, truncated

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


def test_a_text_may_have_sixteen_bytes_for_each_token_of_the_context() -> None:
    assert text_bytes_max(131_072) == 131_072 * 16
    assert text_bytes_max(8) == limits.TEXT_BYTES_ANY
    assert text_bytes_max(8, may_exceed=True) == limits.TEXT_BYTES_COUNTED
    assert text_bytes_max(131_072, may_exceed=True) == 131_072 * 16


def test_the_size_of_a_text_is_that_of_its_utf_8() -> None:
    assert [num_bytes(text) for text in ("", "abc", "é€", "\ud800")] == [0, 3, 5, 3]


@pytest.mark.parametrize(
    ("max_model_len", "code", "told"),
    [
        (8, "context_length_exceeded", "maximum context length is 8 tokens, for which a text may have 100 bytes"),
        (0, "request_too_large", "At most 100 are converted"),
    ],
)
def test_a_larger_text_is_refused(max_model_len: int, code: str, told: str) -> None:
    check_text_size(100, 100, max_model_len, "prompt")
    with pytest.raises(ServiceError) as refused:
        check_text_size(101, 100, max_model_len, "prompt")
    assert (refused.value.code, refused.value.param) == (code, "prompt")
    assert told in refused.value.message
    assert "101 bytes" in refused.value.message
