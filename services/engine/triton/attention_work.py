"""Which program attends to what: the lists that the attention kernels take their work from, made once a step.

    few     sequences with at most `FEW_QUERIES` queries: (sequence, split of its keys) pairs, see `decode_attention`
    many    the others: (sequence, tile of its queries) pairs, those with most keys first, see `prefill_attention`

Both pack a pair into one word, the sequence in the high half. Plain index arithmetic on the host; how arrays reach the
device is the caller's (`put`). Called by the worker for each distinct window of the model's layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SPLIT_TOKENS: Final = 256
"""Keys of one split. Fixed: a sequence's sums must not depend on how many others there are."""
FEW_QUERIES: Final = 9
"""One token and as many guesses as are usually checked in a step."""
_FEW_ROWS = 64
"""Queries times heads of a group beyond which a tile of queries is worth more than splits of the keys."""
_TILE_ROWS = 128
"""Queries times heads of a group in one tile of the prefill kernel."""
_WIDE_TILE_ROWS = 32
"""The same in float32, whose products are made in registers."""

Integers = NDArray[np.int64]
Put = Callable[[NDArray[Any], int], Tensor]
"""Copies an array to the device as int32, in a place for so many elements."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What attention needs to know of the model. `slopes` [heads] float32 or None."""

    kv_heads: int
    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """What the lists depend on: query heads of each key head, and bytes of a query's element."""

    group: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """The S sequences of a step: rows of the block tables, all their tokens, first query and number of queries."""

    rows: Integers
    seq_lens: Integers
    query_starts: Integers
    query_lens: Integers

    def take(self, places: Integers) -> "Sequences":
        """Some of them."""
        return Sequences(*(x[places] for x in (self.rows, self.seq_lens, self.query_starts, self.query_lens)))


@dataclass(frozen=True, slots=True)
class FewWork:
    """Sequences with few queries, int32 on the device; `item_starts` [count + 1], `items` [max_items]."""

    count: int
    max_queries: int
    max_items: int
    rows: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    query_lens: Tensor
    item_starts: Tensor
    items: Tensor
    num_items: Tensor


@dataclass(frozen=True, slots=True)
class ManyWork:
    """Sequences with many queries, int32 on the device; `tiles` [num_tiles], each of `queries_a_tile` queries."""

    num_tiles: int
    queries_a_tile: int
    rows: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    query_lens: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A step's attention for layers with the same window. `tables` [rows, blocks of the longest sequence] int32."""

    tables: Tensor
    window: int | None
    few: FewWork | None
    many: ManyWork | None


def has_few(query_lens: Integers, group: int) -> NDArray[np.bool_]:
    """Which sequences the decode kernel takes."""
    return (query_lens == 1) | ((query_lens <= FEW_QUERIES) & (query_lens * group <= _FEW_ROWS))


def split_items(sequences: Sequences, window: int | None) -> tuple[Integers, Integers]:
    """`item_starts` [S + 1] and the packed (sequence, split) pairs whose keys some query sees."""
    last = -(-sequences.seq_lens // SPLIT_TOKENS)
    first = np.zeros_like(last)
    if window is not None:
        oldest = sequences.seq_lens - sequences.query_lens - window + 1
        first = np.maximum(oldest, 0) // SPLIT_TOKENS
    counts = last - first
    starts = np.concatenate(([0], counts.cumsum()))
    owner = np.repeat(np.arange(len(counts)), counts)
    splits = np.arange(len(owner)) - starts[owner] + first[owner]
    return starts, owner << 16 | splits


def query_tiles(sequences: Sequences, each: int) -> Integers:
    """The packed (sequence, tile of `each` queries) pairs, those that see most keys first: no long one starts last."""
    counts = -(-sequences.query_lens // each)
    owner = np.repeat(np.arange(len(counts)), counts)
    tiles = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
    keys = sequences.seq_lens[owner] - sequences.query_lens[owner] + tiles * each
    return (owner << 16 | tiles)[np.argsort(-keys, kind="stable")]


def queries_a_tile(group: int, itemsize: int) -> int:
    """Queries in a tile of the prefill kernel, each with all heads of a group."""
    return max(1, (_TILE_ROWS if itemsize <= 2 else _WIDE_TILE_ROWS) // group)


def plan_work(
    sequences: Sequences, tables: Tensor, window: int | None, heads: Heads, put: Put, capacity: tuple[int, int] = (0, 0)
) -> DeviceWork:
    """The work of one step. `capacity`: places for sequences and items, where a captured graph has more than there are.

    Only sequences with one query each have a capacity. Its free places have no items.
    """
    few = has_few(sequences.query_lens, heads.group)
    if few.all():
        return DeviceWork(tables, window, _few(sequences, window, put, capacity), None)
    many = sequences.take(np.flatnonzero(~few))
    each = queries_a_tile(heads.group, heads.itemsize)
    tiles = query_tiles(many, each)
    columns = (many.rows, many.seq_lens, many.query_starts, many.query_lens, tiles)
    placed = ManyWork(len(tiles), each, *(put(column, len(column)) for column in columns))
    rest = sequences.take(np.flatnonzero(few))
    return DeviceWork(tables, window, _few(rest, window, put, capacity) if few.any() else None, placed)


def _few(sequences: Sequences, window: int | None, put: Put, capacity: tuple[int, int]) -> FewWork:
    starts, items = split_items(sequences, window)
    real = len(sequences.rows)
    count, max_items = max(real, capacity[0]), max(len(items), capacity[1])
    padded = sequences if count == real else _pad(sequences, count)
    columns = (padded.rows, padded.seq_lens, padded.query_starts, padded.query_lens)
    ends = np.full(count - real, len(items))
    return FewWork(
        count,
        int(sequences.query_lens.max(initial=1)),
        max_items,
        *(put(column, count) for column in columns),
        item_starts=put(np.concatenate((starts, ends)), count + 1),
        num_items=put(np.array([len(items)]), 1),
        # Last: what is copied to the device ends with the items that there are.
        items=put(items, max_items),
    )


def _pad(sequences: Sequences, count: int) -> Sequences:
    """Places without a sequence: no tokens, no queries, an output of their own."""
    rest = count - len(sequences.rows)
    zeros, starts = np.zeros(rest, dtype=np.int64), np.arange(count - rest, count)
    return Sequences(
        np.concatenate((sequences.rows, zeros)),
        np.concatenate((sequences.seq_lens, zeros)),
        np.concatenate((sequences.query_starts, starts)),
        np.concatenate((sequences.query_lens, zeros)),
    )
