"""Prompts for filling in text between a prefix and a suffix, in the order that code models are trained on. Pure.

    first token, prefix, second token, suffix, third token      and the model continues with the text in between

A model can do this if its tokenizer has the three special tokens of one of the families below.
"""

from collections.abc import Callable
from typing import NamedTuple


class InfillTokens(NamedTuple):
    """The ids of the special tokens. `end`: tokens by which the model ends the text, besides its end token."""

    before_prefix: int
    before_suffix: int
    before_middle: int
    end: tuple[int, ...] = ()


class _Family(NamedTuple):
    names: tuple[str, str, str]
    end: tuple[str, ...] = ()


_FAMILIES = (
    # CodeLlama
    _Family(("▁<PRE>", "▁<SUF>", "▁<MID>"), ("▁<EOT>",)),
    # StarCoder, StableCode, Granite Code
    _Family(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<file_sep>",)),
    # SantaCoder
    _Family(("<fim-prefix>", "<fim-suffix>", "<fim-middle>")),
    # Qwen Coder, CodeGemma
    _Family(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<|file_sep|>", "<|file_separator|>")),
    # DeepSeek Coder
    _Family(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
)
_MARK = "☺"
"""A text that no tokenizer merges with the following text."""


def find_infill_tokens(token_to_id: Callable[[str], int | None]) -> InfillTokens | None:
    """Returns the special tokens of a tokenizer for filling in text, None if it has none.

    `token_to_id` returns the id of a token by its string in the vocabulary.
    """
    for family in _FAMILIES:
        first, second, third = map(token_to_id, family.names)
        if first is not None and second is not None and third is not None:
            ends = (token_to_id(name) for name in family.end)
            return InfillTokens(first, second, third, tuple(one for one in ends if one is not None))
    return None


def infill_ids(
    tokens: InfillTokens,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    prefix: str,
    suffix: str,
) -> list[int]:
    """Returns the prompt for filling in the text between `prefix` and `suffix`.

    `encode` converts text without adding special tokens. `decode` converts the tokens back and keeps leading spaces.
    """
    after = encode(suffix)
    if decode(after) != suffix:
        # The tokenizer puts a space before a text, which would be a part of the suffix here.
        marked, mark = encode(_MARK + suffix), encode(_MARK)
        after = marked[len(mark) :] if marked[: len(mark)] == mark else after
    return [tokens.before_prefix, *encode(prefix), tokens.before_suffix, *after, tokens.before_middle]
