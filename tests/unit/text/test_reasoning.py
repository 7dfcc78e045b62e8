"""Thoughts and answer of a reasoning model's output, whole and as it grows."""

import pytest

from shared.text.reasoning import split_reasoning


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("plain", "", (None, "plain")),
        ("a <think>b</think>", "", (None, "a <think>b</think>")),
        ("<think>\nb\n</think>\n\nc", "", ("b", "c")),
        ("<think>b", "", ("b", "")),
        ("b</think>c", "…<think>\n", ("b", "c")),
        ("<think></think>c", "", ("", "c")),
    ],
)
def test_an_output_that_has_ended(text: str, prompt: str, expected: tuple[str | None, str]) -> None:
    assert split_reasoning(text, prompt, ended=True) == expected


@pytest.mark.parametrize("text", ["<think>one < two </ three</think>answer <think>", "no thoughts", "<b>", ""])
def test_what_was_shown_never_changes_as_the_text_grows(text: str) -> None:
    whole = split_reasoning(text, "", ended=True)
    for end in range(len(text) + 1):
        thoughts, answer = split_reasoning(text[:end], "", ended=False)
        assert (whole[0] or "").startswith(thoughts or "")
        assert whole[1].startswith(answer)
