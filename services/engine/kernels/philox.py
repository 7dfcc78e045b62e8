"""Philox-4x32-10, a counter-based random generator without state (Salmon et al., SC 2011).

    block = philox(key, counter)      key 64 bits, counter 4 x 32 bits, block 4 x 32 bits
    u     = (block[0] >> 5, block[1] >> 6) as 53 bits / 2^53, in [0, 1)

The same key and counter give the same number on every machine, in every batch, before and after a preemption. This
makes a seeded request repeatable. Called by the sampler with key = the request's seed and counter = (index of the
output token, purpose, 0, 0).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

SAMPLING: Final = 0
"""Purpose of the draw that chooses a token. Another use of randomness for the same token needs another purpose."""

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

Words = NDArray[np.uint64]
"""32-bit words, each in a 64-bit integer so that products do not overflow."""


def philox_4x32(key: tuple[Words, Words], counter: tuple[Words, Words, Words, Words]) -> tuple[Words, ...]:
    """Returns the four words of the block after ten rounds, for arrays of equal shape.

    Every word is below 2^32. The low word of the key comes first.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> _WORD) ^ c1 ^ k0, right & _LOW, (left >> _WORD) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Words, positions: NDArray[np.int64], purpose: int = SAMPLING) -> NDArray[np.float64]:
    """Returns a number in [0, 1) of 53 bits for each seed and position.

    Seeds have 64 bits, positions are below 2^32, and both arrays have the same length.
    """
    zeros = np.zeros_like(seeds)
    counter = (positions.astype(np.uint64), np.full_like(seeds, purpose), zeros, zeros)
    high, low, _, _ = philox_4x32((seeds & _LOW, seeds >> _WORD), counter)
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
