"""Converts words that an output must not contain to token ids."""

from collections.abc import Sequence

from antiphon.shared.text.codec import Codec


def bad_word_ids(codec: Codec, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of each word in the forms in which it occurs: at the start of a text and after a space.

    A word may still occur in another tokenization.
    """
    forms = [form for word in words for form in (word, f" {word.lstrip()}")]
    token_lists = codec.encode(forms, add_special_tokens=False) if forms else []
    return tuple(dict.fromkeys(tuple(token_ids) for token_ids in token_lists if token_ids))
