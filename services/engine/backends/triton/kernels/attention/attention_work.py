"""Builds the work lists of the attention kernels, once for each step.

    few     sequences with few queries (`has_few`): (sequence, split of its keys) pairs, see `decode_attention` and
            `latent_attention`
    many    the other sequences: (sequence, tile of its queries) pairs, those with most keys first, see
            `prefill_attention`

A query is a token of the step. Both lists pack a pair into one word, with the sequence in the high 16 bits. Plain index
arithmetic on the host; the caller's `put` copies the arrays to the device. Called by the worker for each distinct kind
of the model's layers (`WorkKinds`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.kernels.paged_attention import first_keys
from antiphon.services.engine.kernels.splits import SPLIT_TOKENS, split_tokens, splits_of
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.kv_groups import layer_groups

FEW_QUERIES: Final = 9
"""Maximum number of queries of a sequence in the decode kernel: one token and 8 draft tokens, the usual maximum of a
step.
"""
_FEW_ROWS = 64
"""Number of rows (queries times query heads per key head) above which the prefill kernel is faster than the decode
kernel.
"""
_TILE_ROWS = 128
"""Queries times query heads per key head in one tile of the prefill kernel."""
_WIDE_TILE_ROWS = 32
"""Like `_TILE_ROWS`, for float32, whose products are computed in registers."""
_USUAL_WIDTH = 256
"""Widest head for which these numbers of rows fit the registers."""

Integers = NDArray[np.int64]
Put = Callable[[NDArray[Any], int], Tensor]
"""Puts an array on the device as int32, with room for the given number of elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A layer's attention parameters. `slopes`, `sinks` [heads] float32; None: it has no linear biases, or no sinks."""

    kv_heads: int
    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Parameters of the work lists: query heads per key head, and width of a head in numbers.

    `itemsize`, `stored_itemsize`: bytes of a number in a query, and in the cache.
    """

    group: int
    head_dim: int
    itemsize: int
    stored_itemsize: int
    latent: bool = False
    """Whether keys and values are rows of latents (`latent_attention`). The kernel for few queries divides their heads
    among programs, so it takes any number of heads."""
    chunked_windows: bool = False
    one_form: bool = False
    """Whether the prefill kernel computes all sequences, so that a token has the same bits in any step."""
    mutual: bool = False
    """Whether the tokens of an image attend to each other in these layers (`Sequences.horizons`)."""

    @property
    def split_tokens(self) -> int:
        """See `kernels/splits`."""
        return split_tokens(self.group, latent=self.latent)

    @property
    def few_rows(self) -> int:
        """Most rows of a sequence with several queries that the decode kernel takes."""
        return self._fitting(_FEW_ROWS)

    @property
    def queries_a_tile(self) -> int:
        """Number of queries in a tile of the prefill kernel, each with all query heads of a key head."""
        return max(1, self._fitting(_TILE_ROWS if self.itemsize <= 2 else _WIDE_TILE_ROWS) // self.group)

    def _fitting(self, rows: int) -> int:
        """Returns how many rows take the registers of so many rows of the usual width."""
        if self.latent or self.head_dim <= _USUAL_WIDTH:
            return rows
        padded = 1 << (self.head_dim - 1).bit_length()
        # Converting numbers of 8 bits takes registers too.
        return rows * _USUAL_WIDTH // padded // (2 if self.stored_itemsize < self.itemsize else 1)


WorkKinds = Mapping[tuple[int | None, Heads], Mapping[int, Sequence[int]]]
"""The layers of each kind, which have sliding window and heads in common and share work lists, by their group
(`DecoderDescription.kv_groups`).
"""


def work_kinds(
    description: DecoderDescription, itemsize: int, stored_itemsize: int, *, one_form: bool = False
) -> WorkKinds:
    """Returns the kinds of a model's layers. Bytes of numbers, `one_form`: see `Heads`."""
    groups = layer_groups(description)
    kinds = defaultdict[tuple[int | None, Heads], dict[int, list[int]]](dict)
    for layer, window in enumerate(description.sliding_windows):
        d = description.of_layer(layer)
        heads = Heads(
            group=d.num_heads // d.num_kv_heads,
            head_dim=d.head_dim,
            itemsize=itemsize,
            stored_itemsize=stored_itemsize,
            latent=d.latent is not None,
            chunked_windows=d.chunked_windows,
            one_form=one_form,
            mutual=d.mutual_images and (window is not None or not d.mutual_in_windows),
        )
        kinds[window, heads].setdefault(groups[layer], []).append(layer)
    return kinds


@dataclass(frozen=True, slots=True)
class Sequences:  # positional: columns of the sequences, as the kernels take them
    """The S sequences of a step: row in the block tables, number of tokens, first query and number of queries.

    `horizons` [num_tokens]: position of the last key that each query sees in layers where the tokens of an image attend
    to each other; None: each sees the keys up to its own.
    """

    rows: Integers
    seq_lens: Integers
    query_starts: Integers
    query_lens: Integers
    horizons: Integers | None = None

    def take(self, places: Integers) -> "Sequences":
        """Returns the sequences with the given indices."""
        columns = (x[places] for x in (self.rows, self.seq_lens, self.query_starts, self.query_lens))
        return Sequences(*columns, horizons=self.horizons)

    def look_ahead(self) -> NDArray[np.bool_]:
        """Returns for each sequence whether a query of the step sees a key behind its own."""
        ahead, horizons = np.zeros(len(self.rows), dtype=np.bool_), self.horizons
        if horizons is None:
            return ahead
        for index, first in enumerate(self.query_starts.tolist()):
            own = np.arange(self.seq_lens[index] - self.query_lens[index], self.seq_lens[index])
            ahead[index] = (horizons[first : first + len(own)] > own).any()
        return ahead


@dataclass(frozen=True, slots=True)
class FewWork:  # positional: columns in the order of the kernel's arguments
    """Work list for sequences with few queries, int32 on the device.

    `items` [max_items]: see the module; `item_starts` [count + 1]: index of each sequence's first item.
    """

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
    split_tokens: int = SPLIT_TOKENS


@dataclass(frozen=True, slots=True)
class ManyWork:  # positional: columns in the order of the kernel's arguments
    """Work list for sequences with many queries, int32 on the device.

    `tiles` [num_tiles]: see the module; `horizons` [num_tokens]: see `Sequences`.
    """

    num_tiles: int
    queries_a_tile: int
    rows: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    query_lens: Tensor
    tiles: Tensor
    horizons: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """The work lists of a step for layers of one kind and group. `tables` [rows, blocks] int32: the block tables.

    Tables of layers with a window may have any blocks in place of those that the window has passed.
    """

    tables: Tensor
    window: int | None
    few: FewWork | None
    many: ManyWork | None
    chunked: bool = False
    """Whether windows are chunks, see `kernels/paged_attention`."""

    @property
    def window_kind(self) -> int:
        """How the kernels mask keys before the first one that a query sees: not at all, by a window or by a chunk."""
        return 0 if self.window is None else 2 if self.chunked else 1


def has_few(query_lens: Integers, heads: Heads) -> NDArray[np.bool_]:
    """Returns for each sequence whether the decode kernel computes its attention.

    The decode kernel takes sequences with one query, and sequences with at most `FEW_QUERIES` queries and at most
    `Heads.few_rows` rows. Attention over latents has no limit of rows.
    """
    if heads.one_form:
        return np.zeros(len(query_lens), dtype=np.bool_)
    narrow = heads.latent | (query_lens * heads.group <= heads.few_rows)
    return (query_lens == 1) | ((query_lens <= FEW_QUERIES) & narrow)


def split_items(
    sequences: Sequences, window: int | None, each: int = SPLIT_TOKENS, chunked: bool = False
) -> tuple[Integers, Integers]:
    """Returns `item_starts` [S + 1] and the packed (sequence, split) pairs of splits with keys visible to a query.

    `each`: keys of one of the first splits.
    """
    first_seen = first_keys(sequences.seq_lens - sequences.query_lens, window, chunked)
    first = splits_of(first_seen + 1, each) - 1
    counts = splits_of(sequences.seq_lens, each) - first
    starts = np.concatenate(([0], counts.cumsum()))
    owner = np.repeat(np.arange(len(counts)), counts)
    splits = np.arange(len(owner)) - starts[owner] + first[owner]
    return starts, owner << 16 | splits


def query_tiles(sequences: Sequences, each: int) -> Integers:
    """Returns the packed (sequence, tile of `each` queries) pairs. Those with most keys come first, to balance load."""
    counts = np.maximum(1, -(-sequences.query_lens // each))
    owner = np.repeat(np.arange(len(counts)), counts)
    tiles = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
    keys = sequences.seq_lens[owner] - sequences.query_lens[owner] + tiles * each
    return (owner << 16 | tiles)[np.argsort(-keys, kind="stable")]


def plan_work(
    sequences: Sequences, tables: Tensor, window: int | None, heads: Heads, put: Put, capacity: tuple[int, int] = (0, 0)
) -> DeviceWork:
    """Returns the work lists of one step for layers of one kind.

    `capacity`: (sequences, items) of a captured graph, to which the list is padded; only for steps in which every
    sequence has one query. Padding sequences have no items.
    """
    work = partial(DeviceWork, tables=tables, window=window, chunked=heads.chunked_windows)
    if heads.one_form and len(sequences.rows) < capacity[0]:
        # Sequences without queries have a tile too, which stores nothing.
        sequences = _pad(sequences, capacity[0])
    few = has_few(sequences.query_lens, heads)
    if heads.mutual:
        # The decode kernel's queries see the keys up to their own.
        few &= ~sequences.look_ahead()
    if few.all() and not heads.one_form:
        return work(few=_few(sequences, window, heads, put, capacity), many=None)
    many = sequences.take(np.flatnonzero(~few))
    each = heads.queries_a_tile
    tiles = query_tiles(many, each)
    columns = (many.rows, many.seq_lens, many.query_starts, many.query_lens, tiles)
    horizons = many.horizons if heads.mutual else None
    placed = ManyWork(
        len(tiles),
        each,
        *(put(column, len(column)) for column in columns),
        horizons=None if horizons is None else put(horizons, len(horizons)),
    )
    rest = sequences.take(np.flatnonzero(few))
    placed_few = _few(rest, window, heads, put, capacity) if few.any() else None
    return work(few=placed_few, many=placed)


def _few(sequences: Sequences, window: int | None, heads: Heads, put: Put, capacity: tuple[int, int]) -> FewWork:
    starts, items = split_items(sequences, window, heads.split_tokens, heads.chunked_windows)
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
        # The kernel reads only the first `num_items` of these.
        items=put(items, max_items),
        split_tokens=heads.split_tokens,
    )


def _pad(sequences: Sequences, count: int) -> Sequences:
    """Adds padding sequences without tokens and queries, each with its own output row."""
    rest = count - len(sequences.rows)
    zeros, starts = np.zeros(rest, dtype=np.int64), np.arange(count - rest, count)
    return Sequences(
        np.concatenate((sequences.rows, zeros)),
        np.concatenate((sequences.seq_lens, zeros)),
        np.concatenate((sequences.query_starts, starts)),
        np.concatenate((sequences.query_lens, zeros)),
    )
