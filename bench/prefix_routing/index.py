"""Time and memory of the gateway's index: a set for each engine, as the product has it, and two other structures."""

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from antiphon.services.gateway.path.prefixes import KnownBlocks
from antiphon.shared.blocks import NAME_BITS

PROMPT_TOKENS, BLOCKS_AN_ENGINE = 2000, 20_000
REPEATS = 50


def measure() -> dict[str, Any]:
    """Returns bytes for each block, and microseconds for each look-up in the caches of all engines."""
    cases = [(engines, size) for engines in (4, 64) for size in (16, 64)]
    return {f"{engines} engines, blocks of {size}": _case(engines, PROMPT_TOKENS // size) for engines, size in cases}


def _case(num_engines: int, num_blocks: int) -> dict[str, Any]:
    rng = random.Random(1)
    prompt = [rng.getrandbits(NAME_BITS) for _ in range(num_blocks)]
    parts = [prompt[: rng.randrange(num_blocks + 1)] for _ in range(num_engines)]
    # Each set has integers of its own, as they come from messages of its engine.
    caches = [[*(rng.getrandbits(NAME_BITS) for _ in range(BLOCKS_AN_ENGINE)), *part] for part in parts]
    total = sum(map(len, caches))
    known, set_bytes = _traced(lambda: [KnownBlocks(present={int(str(n)) for n in cache}) for cache in caches])
    masks, mask_bytes = _traced(lambda: _masks(caches))
    return {
        "bytes a block, sets": round(set_bytes / total),
        "bytes a block, one dict of bit sets": round(mask_bytes / total),
        "us, sets and binary search": _time(lambda: [one.overlap(prompt) for one in known]),
        "us, sets in order": _time(lambda: [_in_order(one.present, prompt) for one in known]),
        "us, one dict of bit sets": _time(lambda: _by_mask(masks, prompt, num_engines)),
    }


def _masks(caches: list[list[int]]) -> dict[int, int]:
    masks: dict[int, int] = {}
    for number, cache in enumerate(caches):
        for name in cache:
            masks[int(str(name))] = masks.get(name, 0) | 1 << number
    return masks


def _in_order(present: set[int], prompt: list[int]) -> int:
    return next((place for place, name in enumerate(prompt) if name not in present), len(prompt))


def _by_mask(masks: dict[int, int], prompt: list[int], num_engines: int) -> list[int]:
    found, left = [len(prompt)] * num_engines, (1 << num_engines) - 1
    for place, name in enumerate(prompt):
        gone = left & ~masks.get(name, 0)
        left ^= gone
        while gone:
            lowest = gone & -gone
            found[lowest.bit_length() - 1] = place
            gone ^= lowest
        if not left:
            break
    return found


def _traced(make: Callable[[], Any]) -> tuple[Any, int]:
    tracemalloc.start()
    made = make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return made, size


def _time(look_up: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(REPEATS):
            look_up()
        best = min(best, time.perf_counter() - began)
    return round(best / REPEATS * 1e6, 1)
