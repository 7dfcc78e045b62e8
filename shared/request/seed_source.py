"""Draws the seed of a request that has none: at random, or from the server's seed and the request's number.

A request gets its seed before its sequences are placed, and the samples of all choices depend only on this seed. So the
output does not depend on the engine that runs a sequence or on moves between engines. With a server seed, the same
requests in the same order get the same seeds in every run. Used by the gateway's generating endpoints and offline.
"""

import hashlib
import secrets
from collections.abc import Callable

SeedSource = Callable[[], int]


def random_seed() -> int:
    """Returns an unpredictable seed of 63 bits."""
    return secrets.randbits(63)


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
