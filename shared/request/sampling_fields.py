"""Converts the fields of a request that name tokens, and draws the seeds of requests without one. Pure.

`antiphon.shared.parameters.sampling` takes over all other fields by their names, and checks whether token ids are in
the vocabulary.

A request gets its seed before its sequences are placed, and the samples of all choices depend only on this seed. So the
output does not depend on the engine that runs a sequence or on moves between engines. With a server seed, the same
requests in the same order get the same seeds in every run.
"""

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from antiphon.shared import limits
from antiphon.shared.request.checks import refuse

SeedSource = Callable[[], int]
random_seed: SeedSource = partial(secrets.randbits, 63)
"""Returns an unpredictable seed of 63 bits."""


class TokenConstraints(NamedTuple):
    """The converted fields, as in `SamplingParams`. `bad_word_texts`: words that a tokenizer has to convert."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    bad_word_texts: tuple[str, ...] = ()


_TOKEN_FIELDS = ("logit_bias", "allowed_token_ids", "bad_words")
_NONE = TokenConstraints()


def token_constraints(fields: object) -> TokenConstraints:
    """Returns the constraints of a request. Raises ServiceError. `fields` may lack fields; a missing one means None.

    A beam search takes no constraints, because it works on the model's own probabilities.
    """
    if all(getattr(fields, name, None) is None for name in _TOKEN_FIELDS):
        return _NONE
    for name in _TOKEN_FIELDS:
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


class SequentialSeeds:
    """Returns, at the k-th call, the seed of the k-th request, which depends only on the server's seed and k."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn = 0

    def __call__(self) -> int:
        """Returns the seed of the next request, 63 bits."""
        self._drawn += 1
        digest = hashlib.sha256(f"{self._seed}/request {self._drawn}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def seeds_of(seed: int | None) -> SeedSource:
    """Returns the seed source of a server with this seed; `random_seed` if `seed` is None."""
    return random_seed if seed is None else SequentialSeeds(seed)
