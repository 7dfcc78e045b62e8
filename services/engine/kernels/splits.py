"""How decode attention on a GPU divides the keys of a sequence: each split is a fixed range of positions.

    splits 0 … 63      `split_tokens` keys each, so that short sequences are divided among many programs
    splits 64 …        four times as many, so that long sequences have few sums to combine

Fixed, because a sequence's sums must not depend on the number of other sequences. Plain arithmetic, used by the kernels
and by the planning of memory.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

SPLIT_TOKENS: Final = 256
"""Keys of one of a sequence's first splits."""
SHORT_SPLITS: Final = 64
LONG_SPLIT: Final = 4
"""How many times as many keys a split has behind the first `SHORT_SPLITS`."""
_SPLIT_HEADS = 32
"""Heads of latent attention for which a split has `SPLIT_TOKENS` keys; with more heads it has more keys."""

Integers = NDArray[np.int64]


def split_tokens(group: int, *, latent: bool) -> int:
    """Returns the keys of one of a sequence's first splits. `group`: query heads of a key head.

    With latents, a partial result is as wide as a row for each head. The more heads a model has, the more keys a split
    has, so that all partial results together take no more memory.
    """
    return SPLIT_TOKENS * max(1, group // _SPLIT_HEADS) if latent else SPLIT_TOKENS


def splits_of(num_keys: Integers, split_tokens: int) -> Integers:
    """Returns the number of splits that so many keys from the first one are in. `split_tokens`: see `split_tokens`."""
    short = SHORT_SPLITS * split_tokens
    return -(-np.minimum(num_keys, short) // split_tokens) + -(
        -np.maximum(num_keys - short, 0) // (LONG_SPLIT * split_tokens)
    )
