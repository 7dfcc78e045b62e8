"""Where a request without a seed gets one: from chance, or from the server's own seed and the request's number.

A request has its seed before it is placed, and every choice's draws follow from it: where it runs, and how often it is
moved, changes nothing. With a seed of the server, the same requests in the same order get the same ones in each run.
Used by the endpoints that generate.
"""

import hashlib
import secrets
from collections.abc import Callable

SeedSource = Callable[[], int]


def random_seed() -> int:
    """A seed that nobody can foretell, 63 bits."""
    return secrets.randbits(63)


class SequentialSeeds:
    """Seeds for the first, the second, … request, as a function of the server's seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn = 0

    def __call__(self) -> int:
        """The next one, 63 bits."""
        self._drawn += 1
        digest = hashlib.sha256(f"{self._seed}/request {self._drawn}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def seeds_of(seed: int | None) -> SeedSource:
    """What draws seeds for a server with this seed, or with none."""
    return random_seed if seed is None else SequentialSeeds(seed)
