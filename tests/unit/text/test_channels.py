"""Reasoning and answer of gpt-oss's messages, in pieces of any size."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared.text.channels import ChannelSplitter
from antiphon.shared.text.reasoning import Parts

ANALYSIS, FINAL, COMMENTARY = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"


def split(*pieces: str, inside: bool = False) -> tuple[str | None, str]:
    splitter = ChannelSplitter(inside=inside)
    parts = [part for piece in pieces for part in rest(partial(splitter.feed, ""), splitter.feed(piece))]
    parts += rest(splitter.finish, splitter.finish())
    reasoning = "".join(part.reasoning for part in parts)
    return reasoning if splitter.found else None, "".join(part.answer for part in parts)


def rest(more: Callable[[], Parts], parts: Parts) -> Iterator[Parts]:
    while any(parts):
        yield parts
        parts = more()


def test_reasoning_after_a_part_of_the_answer_is_returned_after_it() -> None:
    splitter = ChannelSplitter()
    text = f"{ANALYSIS}a{NEXT}{COMMENTARY}b{NEXT}{ANALYSIS}c{NEXT}{FINAL}d"
    assert list(rest(partial(splitter.feed, ""), splitter.feed(text))) == [("a", "b"), ("\nc", "\nd")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}a{NEXT}{FINAL}b<|return|>", ("a", "b")),
        (f"{ANALYSIS}a\n{NEXT}{ANALYSIS}b{NEXT}{COMMENTARY}c{NEXT}{FINAL} d", ("a\n\nb", "c\n d")),
        (f"{FINAL}b", (None, "b")),
        ("<|message|>b", (None, "b")),
        ("plain <b> text\n", (None, "plain <b> text\n")),
        ("", (None, "")),
        ("  ", (None, "  ")),
        (f"{ANALYSIS}a<|end|> \n<|start|>assistant{FINAL}b", ("a", "b")),
        (f"{ANALYSIS}a{FINAL}b", ("a", "b")),
        (f"{ANALYSIS}a<|end|>b", ("a", "b")),
        (f"{ANALYSIS}<|end|>", ("", "")),
        (f"{ANALYSIS}a", ("a", "")),
        # Calls keep their headers.
        (f"{ANALYSIS}a{NEXT}{CALL}<|call|>", ("a", f"<|start|>assistant{CALL}<|call|>")),
        (f"{ANALYSIS}a{NEXT}{COMMENTARY}b{NEXT}{CALL}", ("a", f"b<|start|>assistant{CALL}")),
        (" to=functions.now<|channel|>commentary json<|message|>{}", (None,
         " to=functions.now<|channel|>commentary json<|message|>{}")),
        ("<|channel|>analysis to=functions.now code<|message|>{}", (None,
         "<|channel|>analysis to=functions.now code<|message|>{}")),
        ("<|channel|>analysis to=python code<|message|>1<|call|>", ("1", "")),
        # Incomplete headers, and what is no header.
        (f"{ANALYSIS}a{NEXT}", ("a", "")),
        (f"{ANALYSIS}a{NEXT}<|channel|>fin", ("a", "")),
        (" to=functions.now", (None, "")),
        (f"{ANALYSIS}a<|end|><|sta", ("a", "<|sta")),
        (f"{ANALYSIS}a{NEXT}, said he.", ("a", "<|start|>assistant, said he.")),
        (f"a <|channel|> b {FINAL}c", (None, "a <|channel|> b \nc")),
        ("<|start|>a<|end|>b", (None, "<|start|>a\nb")),
        ("to=functions. none", (None, "to=functions. none")),
    ],
)  # fmt: skip
def test_the_parts_of_an_output(text: str, expected: tuple[str | None, str]) -> None:
    assert split(text) == expected
    assert split(*text) == expected


def test_reasoning_that_the_prompt_has_begun_is_continued() -> None:
    assert split(f"a{NEXT}{FINAL}b", inside=True) == ("a", "b")


PIECES = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "assistant",
          "analysis", "final", " to=functions.now", " to=", "json", " ", "\n", "a", "{}", "<|", "!"]  # fmt: skip


@given(st.lists(st.sampled_from([*PIECES, ANALYSIS, FINAL, CALL, NEXT]), max_size=10), st.data(), st.booleans())
def test_the_parts_do_not_depend_on_how_the_output_is_cut(texts: list[str], data: st.DataObject, inside: bool) -> None:
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = split(text, inside=inside)
    assert split(*pieces, inside=inside) == whole
    assert split(*text, inside=inside) == whole


@given(st.text(max_size=60).filter(lambda text: not text.startswith(" to=functions.")))
def test_ordinary_text_is_never_changed(text: str) -> None:
    """What begins like the header of a call is one, and it is cut off here."""
    assert split(text) == (None, text)


@pytest.mark.parametrize("unit", ["<|end|>", "<|start|>a! ", "<|channel|>a ", ANALYSIS, NEXT, " ", "to=functions. "])
def test_the_cost_does_not_grow_faster_than_the_output(unit: str) -> None:
    text = unit * (400_000 // len(unit))
    for pieces in ([text], [ANALYSIS, text], [text[start : start + 8] for start in range(0, 40_000, 8)]):
        _, answer = split(*pieces)
        assert len(answer) <= len("".join(pieces)) * 2


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    splitter = ChannelSplitter()
    pieces = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "a",
        " b",
        "<|end|>",
        "<|start|>assistant",
        FINAL,
        "c",
        "<|",
        "d",
    ]
    parts = [splitter.feed(piece) for piece in pieces]
    assert [part.reasoning for part in parts] == ["", "", "", "a", " b", "", "", "", "", "", ""]
    assert [part.answer for part in parts] == ["", "", "", "", "", "", "", "", "c", "", "<|d"]
