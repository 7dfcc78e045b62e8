"""Finds the KV that a joining sequence can reuse: from the prefix cache, from the host, or from a sibling. No I/O.

A sibling is a running sequence of the same group or the source of a fork (`Sequence.siblings`). Reused KV is either

    shared      full blocks that other sequences hold or that are on the free list; they are never written to
    copied      new blocks after the shared ones, filled by copies: from the host, or one block from a sibling

The prefix cache is looked up first; host blocks or a sibling are used only if they cover more tokens. A sibling's
full blocks can be shared as soon as the step that fills them is planned, even if it is the step being planned, because
in each layer a step writes all its keys and values before it reads any. A block can be copied only if its tokens were
computed by earlier steps, because a step's copies run before its computation, and no copy reads what another copy
writes. If waiting for one step makes many more tokens reusable, the sequence should wait. Called by `residency`.
"""

from array import array
from dataclasses import dataclass, field, replace
from operator import attrgetter

from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.engine.core.kv.prefix_cache import PrefixCache
from antiphon.services.engine.core.kv.states import StatePool
from antiphon.services.engine.core.kv.windows import Windows
from antiphon.services.engine.core.sequence import Sequence, Status

WORTH_WAITING_TOKENS = 16
"""A sequence waits a step if that saves the computation of more than this many prompt tokens, which takes about as long
as a decode step.
"""
_NUM_TOKENS = attrgetter("num_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reusable:
    """Reusable KV of the first `num_tokens` tokens of a waiting sequence: blocks in `shared`, then copied blocks."""

    shared: list[int]
    num_tokens: int
    copied: int | None = None
    """The sibling's block to copy, which holds the tokens behind the shared blocks; None if there is none."""
    window_first: int = 0
    """The first column (`windows`) that the next token reads."""
    window: list[int] = field(default_factory=list[int])
    """The columns from there on, to be shared."""
    copied_window: tuple[int, ...] = ()
    """The column beside `copied`."""
    num_soon: int = 0
    """Value that `num_tokens` will have once all steps planned so far have been applied."""
    num_known: int = 0
    """Number of tokens whose blocks are cached. Those after `num_tokens` lack a snapshot of the recurrent state."""
    from_host: bool = False
    """Whether the tokens behind the shared blocks are in the sequence's host blocks."""

    @property
    def reused(self) -> list[int]:
        """All blocks to be shared."""
        return self.shared + self.window

    @property
    def worth_waiting(self) -> bool:
        """Whether joining a later step costs less than computing the tokens that are reusable only then."""
        return self.num_soon - self.num_tokens > WORTH_WAITING_TOKENS


@dataclass(frozen=True, slots=True)
class Shortage:
    """The resources that the head of the queue lacked when it did not fit.

    The head's prefix is looked up again only when `num_blocks` free blocks and a budget of `num_tokens` are available,
    or when the block with the hash `first_miss`, the first that the prefix cache did not have, is published.
    """

    sequence: Sequence
    num_blocks: int
    num_tokens: int
    first_miss: bytes | None

    def goes_on(self, num_free_blocks: int, budget: int, pool: BlockPool) -> bool:
        """Returns whether the head still cannot fit. Makes no lookup, because its time grows with the head's length."""
        if self.num_blocks <= num_free_blocks and self.num_tokens <= budget:
            return False
        return self.first_miss is None or pool.find(self.first_miss) is None


def find_reusable(
    sequence: Sequence, prefix_cache: PrefixCache, states: StatePool, windows: Windows, block_size: int
) -> Reusable:
    """Returns the longest reusable prefix from the prefix cache, the host blocks or the first sibling with a row.

    Siblings are not considered if host blocks cover more tokens than the prefix cache. Adds no references: the caller
    must do that before it allocates blocks. Nothing is reusable for a sequence that needs results for all its tokens
    (`Sequence.reuses_kv`).
    """
    if not sequence.reuses_kv:
        return Reusable(shared=[], num_tokens=0)
    cached = prefix_cache.lookup(sequence)
    hits = windows.usable(sequence, states.usable(cached))
    first, window = windows.cached(sequence, len(hits))
    found = Reusable(
        shared=hits,
        num_tokens=len(hits) * block_size,
        num_known=len(cached) * block_size,
        window_first=first,
        window=window,
    )
    num_host = sequence.num_host_tokens
    on_host = num_host > found.num_tokens and len(cached) >= sequence.num_host_skipped
    # The state on which it goes on, and the columns, are those after exactly these tokens.
    if on_host and (not states or sequence.state >= 0):
        shared, first = cached[: num_host // block_size], sequence.host_window_first
        return Reusable(shared=shared, num_tokens=num_host, from_host=True, window_first=first)
    for sibling in sequence.siblings:
        if sibling.row >= 0 and sibling.status is not Status.FINISHED:
            of_sibling = _of_sibling(sequence, sibling, prefix_cache, states, windows, block_size)
            most = max(found, of_sibling, key=_NUM_TOKENS)
            return replace(most, num_soon=of_sibling.num_soon, num_known=found.num_known)
    return found


def _of_sibling(
    sequence: Sequence,
    sibling: Sequence,
    prefix_cache: PrefixCache,
    states: StatePool,
    windows: Windows,
    block_size: int,
) -> Reusable:
    # The last token must be computed for sampling.
    most = min(_common_length(sequence.tokens, sibling.tokens), sequence.num_tokens - 1)
    if states:
        # Only a snapshot that an earlier step has written: in a step, sequences do not wait for each other's states.
        now, soon = (
            states.usable(sibling.block_table[: min(count, most) // block_size])
            for count in (sibling.num_computed_tokens, sibling.num_scheduled_tokens)
        )
        prefix_cache.know(sequence, len(now))
        return Reusable(shared=now, num_tokens=len(now) * block_size, num_soon=len(soon) * block_size)
    joined_before = sibling.status is Status.RUNNING
    num_copied = min(sibling.num_computed_tokens, most) if joined_before else 0
    num_planned = min(sibling.num_scheduled_tokens, most) // block_size * block_size
    num_tokens, num_soon = max(num_copied, num_planned), min(sibling.num_scheduled_tokens, most)
    held = windows.held(sibling, num_tokens)
    if held is None or windows.held(sibling, num_soon) is None:
        # It has computed so much more that it has freed columns that this sequence would read.
        return Reusable(shared=[], num_tokens=0)
    num_full, rest = divmod(num_tokens, block_size)
    prefix_cache.know(sequence, num_full)
    return Reusable(
        shared=sibling.block_table[:num_full],
        num_tokens=num_tokens,
        copied=sibling.block_table[num_full] if rest else None,
        num_soon=num_soon,
        window_first=held[0],
        window=held[1],
        copied_window=held[2],
    )


def _common_length(first: "array[int]", second: "array[int]") -> int:
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])
