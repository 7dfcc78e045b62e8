"""What a sequence that joins need not compute: blocks of others, its own on the host, those of a relative. Pure.

    shared      full blocks that others hold or that wait on the free list: held with them, never written
    the rest    the blocks behind them, new ones, are filled by copies: from the host, or one from a relative

The prefix cache is asked first. What was swapped out or a relative has goes further or is not used. A relative's blocks
can be shared as soon as the step that fills them is planned, even this very one: a step writes all its keys and values
before it reads any. Copied is only what earlier steps have computed, as copies come before everything else in a step,
and none reads what another writes. Where that makes a difference of many tokens, it is worth waiting a step.
Called by `scheduler`.
"""

from array import array
from dataclasses import dataclass, replace
from operator import attrgetter

from services.engine.core.prefix_cache import PrefixCache
from services.engine.core.sequence import Sequence, Status

WORTH_WAITING_TOKENS = 16
"""A step that only decodes takes a new sequence about as long as so many tokens of a prompt."""
_NUM_TOKENS = attrgetter("num_tokens")


@dataclass(frozen=True, slots=True)
class Reusable:
    """The first `num_tokens` of a waiting sequence have KV, in `shared` and behind them in blocks that are copied."""

    shared: list[int]
    num_tokens: int
    copied: int | None = None
    """The block behind the shared ones that has the rest, when it is a relative's."""
    num_soon: int = 0
    """As `num_tokens`, in a step that follows the landing of all that is planned now."""

    @property
    def worth_waiting(self) -> bool:
        """Whether computing the difference costs more than to join a step later."""
        return self.num_soon - self.num_tokens > WORTH_WAITING_TOKENS


def find_reusable(sequence: Sequence, prefix_cache: PrefixCache, block_size: int) -> Reusable:
    """The longest of what is there. Nothing is held yet: the caller does that before it allocates anything."""
    hits = prefix_cache.lookup(sequence)
    found = Reusable(hits, len(hits) * block_size)
    if sequence.num_host_tokens > found.num_tokens:
        return Reusable(hits, sequence.num_host_tokens)
    for relative in sequence.relatives:
        if relative.row >= 0 and relative.status is not Status.FINISHED:
            of_relative = _of_relative(sequence, relative, prefix_cache, block_size)
            return replace(max(found, of_relative, key=_NUM_TOKENS), num_soon=of_relative.num_soon)
    return found


def _of_relative(sequence: Sequence, relative: Sequence, prefix_cache: PrefixCache, block_size: int) -> Reusable:
    # Something must be left to sample from.
    most = min(_common_length(sequence.tokens, relative.tokens), sequence.num_tokens - 1)
    joined_before = relative.status is Status.RUNNING
    num_copied = min(relative.num_computed_tokens, most) if joined_before else 0
    num_planned = min(relative.num_scheduled_tokens, most) // block_size * block_size
    num_tokens = max(num_copied, num_planned)
    num_full, rest = divmod(num_tokens, block_size)
    prefix_cache.know(sequence, num_full)
    copied = relative.block_table[num_full] if rest else None
    num_soon = min(relative.num_scheduled_tokens, most)
    return Reusable(relative.block_table[:num_full], num_tokens, copied, num_soon)


def _common_length(first: "array[int]", second: "array[int]") -> int:
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])
