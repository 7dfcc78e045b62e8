"""Truncation of texts that are pooled: their first tokens are kept, and the special tokens around them.

The result is that of transformers with `truncation=True` and a tokenizer that truncates on the right. Prompts of
generations keep their last tokens instead (`antiphon.shared.parameters.context.truncated`).
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from antiphon.shared.errors import ServiceError


def encode_first(tokenizer: Tokenizer, texts: Sequence[str], keep: int, *, add_special_tokens: bool) -> list[list[int]]:
    """Returns at most `keep` token ids of each text, special tokens included. Raises ServiceError."""
    room = _room(tokenizer, keep, is_pair=False, add_special_tokens=add_special_tokens)
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    for encoding in encodings:
        encoding.truncate(room)
    return [tokenizer.post_process(one, None, add_special_tokens).ids for one in encodings]


def encode_first_of_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], keep: int, *, add_special_tokens: bool
) -> list[Encoding]:
    """Returns each pair with at most `keep` tokens, special tokens included: the longer text is shortened first.

    Raises ServiceError.
    """
    room = _room(tokenizer, keep, is_pair=True, add_special_tokens=add_special_tokens)
    texts = [text for pair in pairs for text in pair]
    parts = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    found: list[Encoding] = []
    for first, second in zip(parts, parts, strict=True):
        num_first, num_second = shares(len(first), len(second), room)
        first.truncate(num_first)
        second.truncate(num_second)
        found.append(tokenizer.post_process(first, second, add_special_tokens))
    return found


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of each text of a pair are kept: all of a short text; of a long one, the rest or half."""
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


def cut_inside(whole: Sequence[int], plain: Sequence[int], keep: int) -> list[int]:
    """Returns at most `keep` ids of `whole`, where `whole` is a text's ids `plain` with special tokens around them.

    For tokenizers that return only ids. Raises ServiceError.
    """
    if len(whole) <= keep:
        return list(whole)
    num_special = len(whole) - len(plain)
    start = next((at for at in range(num_special + 1) if list(whole[at : at + len(plain)]) == list(plain)), None)
    if start is None:
        text = "'truncate_prompt_tokens' is not supported with this model's tokenizer, which puts special tokens into "
        raise ServiceError("unsupported_parameter", text + "a text.", param="truncate_prompt_tokens")
    _check_room(keep - num_special, num_special)
    return [*whole[:start], *plain[: keep - num_special], *whole[start + len(plain) :]]


def _room(tokenizer: Any, keep: int, *, is_pair: bool, add_special_tokens: bool) -> int:
    num_special: int = tokenizer.num_special_tokens_to_add(is_pair) if add_special_tokens else 0
    _check_room(keep - num_special, num_special)
    return keep - num_special


def _check_room(room: int, num_special: int) -> None:
    if room < 1:
        text = f"'truncate_prompt_tokens' must be at least {num_special + 1}: the tokenizer adds {num_special} special "
        raise ServiceError("invalid_value", text + "tokens.", param="truncate_prompt_tokens")
