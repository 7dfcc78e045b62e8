"""Converts the request fields that name tokens: `logit_bias`, `allowed_token_ids`, `bad_words`. Pure.

Whether the ids are in the vocabulary is checked by `shared.parameters.sampling.check_vocabulary`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shared import limits
from shared.request.checks import refuse


class TokenConstraints(NamedTuple):
    """The converted fields, as in `SamplingParams`. `bad_word_texts`: words that a tokenizer has to convert."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    bad_word_texts: tuple[str, ...] = ()


_FIELDS = ("logit_bias", "allowed_token_ids", "bad_words")
_NONE = TokenConstraints()


def token_constraints(fields: object) -> TokenConstraints:
    """Returns the constraints of a request. Raises ServiceError. `fields` may lack fields; a missing one means None.

    A beam search takes no constraints, because it works on the model's own probabilities.
    """
    if all(getattr(fields, name, None) is None for name in _FIELDS):
        return _NONE
    for name in _FIELDS:
        if getattr(fields, "use_beam_search", None) and getattr(fields, name, None):
            refuse(name, "cannot be given together with 'use_beam_search'")
    allowed: Sequence[int] | None = getattr(fields, "allowed_token_ids", None)
    words: Sequence[int | str] = getattr(fields, "bad_words", None) or ()
    texts = tuple(word for word in words if isinstance(word, str))
    if any(not 1 <= len(text) <= limits.STOP_STRING_CHARS_MAX for text in texts):
        refuse("bad_words", f"must hold token ids, or texts of 1 to {limits.STOP_STRING_CHARS_MAX} characters")
    if len(words) > limits.BAD_WORDS_MAX:
        refuse("bad_words", f"must hold at most {limits.BAD_WORDS_MAX} words")
    return TokenConstraints(
        _bias(getattr(fields, "logit_bias", None) or {}),
        None if allowed is None else tuple(allowed),
        tuple((word,) for word in words if not isinstance(word, str)),
        texts,
    )


def _bias(bias: Mapping[Any, float]) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not (isinstance(key, int) or (isinstance(key, str) and key.isascii() and key.isdigit())):
            refuse("logit_bias", "must have token ids as keys")
        found[int(key)] = float(value)
    return tuple(found.items())
