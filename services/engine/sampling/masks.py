"""Packed bitmasks of allowed tokens: bit i of the mask is token i, 32 tokens in a little-endian word.

All backends use this form: 19 KB for a vocabulary of 150,000, an eighth of a byte mask. Bits beyond the vocabulary are
0. Pure.
"""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
"""Shape [ceil(vocab_size / 32)]."""
BITS = 32


def num_words(vocab_size: int) -> int:
    """Returns the number of words of a mask."""
    return -(-vocab_size // BITS)


def all_tokens(vocab_size: int) -> Mask:
    """Returns a mask that allows every token."""
    mask = np.full(num_words(vocab_size), 0xFFFFFFFF, dtype=np.uint32)
    if rest := vocab_size % BITS:
        mask[-1] = (1 << rest) - 1
    return mask


def only(token_ids: "Sequence[int] | NDArray[np.int64]", vocab_size: int) -> Mask:
    """Returns a mask that allows only these tokens; ids outside the vocabulary are left out."""
    ids = _inside(token_ids, vocab_size)
    mask = np.zeros(num_words(vocab_size), dtype=np.uint32)
    np.bitwise_or.at(mask, ids // BITS, _bits(ids))
    return mask


def without(mask: Mask, token_ids: "Sequence[int] | NDArray[np.int64]", vocab_size: int) -> Mask:
    """Returns a copy of the mask that forbids these tokens too; ids outside the vocabulary are left out."""
    return mask & ~only(token_ids, vocab_size)


def of_bytes(packed: bytes, vocab_size: int) -> Mask:
    """Returns the mask in `packed`, which may cover fewer or more tokens than the vocabulary; missing ones are 0.

    The mask may be read-only.
    """
    every = _every(vocab_size)
    words = np.frombuffer(packed, dtype="<u4", count=min(len(packed) // 4, len(every)))
    if len(words) == len(every):
        return words & every if vocab_size % BITS else words
    mask = np.zeros(len(every), dtype=np.uint32)
    mask[: len(words)] = words
    return mask & every


@functools.lru_cache(maxsize=8)
def _every(vocab_size: int) -> Mask:
    """Returns `all_tokens`, cached and read-only, because a mask is made for every row of every step."""
    mask = all_tokens(vocab_size)
    mask.flags.writeable = False
    return mask


def forbidden(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """Returns for each token whether the mask forbids it, [vocab_size]; for masks [n, words], [n, vocab_size]."""
    bits = np.unpackbits((~mask).view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def greatest_logits(mask: Mask, vocab_size: int) -> NDArray[np.float32]:
    """Returns the greatest possible logit of each token, [vocab_size]: +inf if it is allowed, otherwise -inf.

    For masks [n, words], [n, vocab_size]. Looked up by byte, which is several times as fast as `forbidden`.
    """
    values = np.take(_of_byte(), mask.view(np.uint8), axis=0)
    return values.reshape(*mask.shape[:-1], -1)[..., :vocab_size]


@functools.cache
def _of_byte() -> NDArray[np.float32]:
    """Returns the greatest logits of eight tokens for each byte of a mask, [256, 8], read-only."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    values = np.where(bits == 1, np.float32(np.inf), np.float32(-np.inf))
    values.flags.writeable = False
    return values


def allowed_ids(mask: Mask, vocab_size: int) -> NDArray[np.int64]:
    """Returns the ids of the allowed tokens, ascending."""
    return np.flatnonzero(~forbidden(mask, vocab_size))


def _inside(token_ids: "Sequence[int] | NDArray[np.int64]", vocab_size: int) -> NDArray[np.int64]:
    ids = np.asarray(token_ids, dtype=np.int64).reshape(-1)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _bits(ids: NDArray[np.int64]) -> Mask:
    return np.left_shift(np.uint32(1), (ids % BITS).astype(np.uint32))
