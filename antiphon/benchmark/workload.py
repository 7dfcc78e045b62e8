"""Made-up prompts of exact lengths, and moments at which requests arrive; the same ones for the same seed. Pure."""

import random

FIRST_TOKEN_ID = 10
"""Lower ids are often special tokens."""


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Lists of `length` token ids; each request has other ones, so that no prefix is found in a cache."""
    draw = random.Random(f"prompts/{seed}")
    return [
        [draw.randrange(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size) for _ in range(length)] for _ in range(count)
    ]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process of `rate` requests a second.

    An infinite rate: all at once.
    """
    draw = random.Random(f"arrivals/{seed}")
    moments: list[float] = []
    now = 0.0
    for _ in range(count):
        moments.append(now)
        now += draw.expovariate(rate) if rate != float("inf") else 0.0
    return moments
