"""Random prompts of exact lengths and random arrival times, determined by a seed. Pure."""

import random

FIRST_TOKEN_ID = 10
"""Lower ids are often special tokens."""


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Returns lists of `length` token ids, different for each request, so that no prefix is found in a cache."""
    draw = random.Random(f"prompts/{seed}")
    return [
        [draw.randrange(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size) for _ in range(length)] for _ in range(count)
    ]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Returns arrival times in seconds since the start: a Poisson process of `rate` requests per second.

    With an infinite rate all arrive at once.
    """
    draw = random.Random(f"arrivals/{seed}")
    timestamps: list[float] = []
    now = 0.0
    for _ in range(count):
        timestamps.append(now)
        now += draw.expovariate(rate) if rate != float("inf") else 0.0
    return timestamps
