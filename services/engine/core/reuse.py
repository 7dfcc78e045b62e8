"""What a sequence that joins need not compute: blocks of others, its own blocks on the host, a fork's source. Pure.

    shared      full blocks that others hold or that wait on the free list: held with them, never written
    the rest    the blocks behind them, new ones, are filled by copies: from the host, or one from the fork's source

The prefix cache is asked first. What was swapped out or the source has goes further or is not used. Called by
`scheduler`.
"""

from dataclasses import dataclass

from services.engine.core.prefix_cache import PrefixCache
from services.engine.core.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Reusable:
    """The first `num_tokens` of a waiting sequence have KV, in `shared` and behind them in blocks that are copied."""

    shared: list[int]
    num_tokens: int
    copied: int | None = None
    """The block behind the shared ones that has the rest, when the sequence is a fork."""


def find_reusable(sequence: Sequence, prefix_cache: PrefixCache, block_size: int) -> Reusable:
    """The longest of what is there. Nothing is held yet: the caller does that before it allocates anything."""
    hits = prefix_cache.lookup(sequence)
    found = Reusable(hits, len(hits) * block_size)
    if sequence.num_host_tokens > found.num_tokens:
        return Reusable(hits, sequence.num_host_tokens)
    source = sequence.fork_source
    if source is None or source.status is not Status.RUNNING:
        return found
    # Something must be left to sample from.
    num_tokens = min(source.num_computed_tokens, sequence.num_forked_tokens, sequence.num_tokens - 1)
    if num_tokens <= found.num_tokens:
        return found
    num_full, rest = divmod(num_tokens, block_size)
    prefix_cache.know(sequence, num_full)
    return Reusable(source.block_table[:num_full], num_tokens, source.block_table[num_full] if rest else None)
