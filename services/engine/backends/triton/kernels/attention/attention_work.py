"""Builds the work lists of the attention kernels, once for each step.

    few     sequences with few queries (`has_few`): (sequence, split of its keys) pairs, see `decode_attention` and
            `latent_attention`
    many    the other sequences: (sequence, tile of its queries) pairs, those with most keys first, see
            `prefill_attention`
    expanded    the sequences with many queries whose keys and values are computed from latents, see `expanded_work`

A query is a token of the step. All lists pack a pair into one word, with the sequence in the high 16 bits. Plain index
arithmetic on the host; the caller's `put` copies the arrays to the device. Called by the worker for each distinct kind
of the model's layers (`WorkKinds`).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.attention.expanded_work import (
    ExpandedWork,
    Pieces,
    expands,
    plan_pieces,
)
from antiphon.services.engine.kernels.paged_attention import first_keys
from antiphon.services.engine.kernels.splits import SPLIT_TOKENS, split_tokens, splits_of
from antiphon.services.engine.models.description import DecoderDescription, LatentAttention
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

_USUAL_MADE = 128
"""Widest keys (without the rotated part) and values, made of latents, whose tiles of `_TILE_ROWS` fit the registers."""

Integers = NDArray[np.int64]
Put = Callable[[NDArray[Any], int], Tensor]
"""Puts an array on the device as int32, with room for the given number of elements."""
PutAny = Callable[[NDArray[Any]], Tensor]
"""Like `Put`, for an array of any size."""


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
    latent: LatentAttention | None = None
    """Of layers whose keys and values are rows of latents (`latent_attention`). The kernel for few queries divides
    their heads among programs, so it takes any number of heads."""
    chunked_windows: bool = False
    one_form: bool = False
    """Whether the prefill kernel computes all sequences, so that a token has the same bits in any step."""
    mutual: bool = False
    """Whether the tokens of an image attend to each other in these layers (`Sequences.horizons`)."""

    @property
    def split_tokens(self) -> int:
        """See `kernels/splits`."""
        return split_tokens(self.group, latent=self.latent is not None)

    @property
    def few_rows(self) -> int:
        """Most rows of a sequence with several queries that the decode kernel takes."""
        return self._fitting(_FEW_ROWS)

    @property
    def queries_a_tile(self) -> int:
        """Number of queries in a tile of the prefill kernel, each with all query heads of a key head."""
        return max(1, self._fitting(self._tile_rows) // self.group)

    @property
    def queries_an_expanded_tile(self) -> int:
        """Number of queries in a tile of the kernel for expanded latents, each with one head."""
        assert self.latent is not None
        wide = max(self.latent.nope_dim, self.latent.value_dim) > _USUAL_MADE
        return self._tile_rows // 2 if wide else self._tile_rows

    @property
    def _tile_rows(self) -> int:
        return _TILE_ROWS if self.itemsize <= 2 else _WIDE_TILE_ROWS

    def _fitting(self, rows: int) -> int:
        """Returns how many rows take the registers of so many rows of the usual width."""
        if self.latent is not None or self.head_dim <= _USUAL_WIDTH:
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
            latent=d.latent,
            chunked_windows=d.chunked_windows,
            one_form=one_form,
            mutual=d.mutual_images and (window is not None or not d.mutual_in_windows),
        )
        kinds[window, heads].setdefault(groups[layer], []).append(layer)
    return kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the work lists of a captured graph have room for, to which they are padded.

    `few`: sequences with at most `queries` queries, and `items`, the splits of their keys; `many`: other sequences, and
    `tiles`, those of their queries.
    """

    few: int
    items: int
    queries: int
    many: int
    tiles: int


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

    def padded(self, count: int) -> tuple[Integers, ...]:
        """Returns the four columns with as many more sequences, without tokens and queries, as make `count`."""
        rest = np.zeros(count - len(self.rows), dtype=np.int64)
        columns = self.rows, self.seq_lens, self.query_starts, self.query_lens
        return tuple(np.concatenate((column, rest)) for column in columns)


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
    expanded: ExpandedWork | None = None

    @property
    def window_kind(self) -> int:
        """How the kernels mask keys before the first one that a query sees: not at all, by a window or by a chunk."""
        return 0 if self.window is None else 2 if self.chunked else 1


def has_few(query_lens: Integers, heads: Heads, most: int = FEW_QUERIES) -> NDArray[np.bool_]:
    """Returns for each sequence whether the decode kernel computes its attention.

    The decode kernel takes sequences with one query, and sequences with at most `most` queries and at most
    `Heads.few_rows` rows. Attention over latents has no limit of rows.
    """
    if heads.one_form:
        return np.zeros(len(query_lens), dtype=np.bool_)
    narrow = heads.latent is not None or (query_lens * heads.group <= heads.few_rows)
    return (query_lens == 1) | ((query_lens <= most) & narrow)


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
    sequences: Sequences,
    tables: Tensor,
    window: int | None,
    heads: Heads,
    put: Put,
    room: Room | None = None,
    put_any: PutAny | None = None,
) -> DeviceWork:
    """Returns the work lists of one step for layers of one kind.

    `room`: of the captured graph that runs the step. Latents are not expanded in graphs, because how many pieces that
    takes depends on the contexts. `put_any`: for lists that grow with contexts; None: `put` has room for them too.
    """
    few = has_few(sequences.query_lens, heads, FEW_QUERIES if room is None else room.queries)
    if heads.mutual and room is None:
        # The decode kernel's queries see the keys up to their own. No graph computes images.
        few &= ~sequences.look_ahead()
    expanded = np.zeros_like(few)
    if heads.latent is not None and room is None:
        contexts = sequences.seq_lens - sequences.query_lens
        expanded = ~few & expands(sequences.query_lens, contexts, heads.latent)
    some, rest = (sequences.take(np.flatnonzero(found)) for found in (few, ~few & ~expanded))
    takes_few, takes_many = (len(some.rows), len(rest.rows)) if room is None else (room.few, room.many)
    return DeviceWork(
        tables=tables,
        window=window,
        few=_few(some, window, heads, put, room) if takes_few else None,
        many=_many(rest, heads, put, room) if takes_many else None,
        expanded=_expanded(sequences, expanded, heads, put, put_any) if expanded.any() else None,
        chunked=heads.chunked_windows,
    )


def _expanded(
    sequences: Sequences, expanded: NDArray[np.bool_], heads: Heads, put: Put, put_any: PutAny | None
) -> ExpandedWork:
    assert heads.latent is not None
    each = heads.queries_an_expanded_tile
    mine, rest = sequences.take(np.flatnonzero(expanded)), sequences.take(np.flatnonzero(~expanded))
    ends = rest.query_starts + rest.query_lens
    num_tokens = int(sequences.query_lens.sum())
    pieces = Pieces(latent=heads.latent, heads=heads.group, itemsize=heads.itemsize, num_tokens=num_tokens)
    most_rows = pieces.num_rows(int(mine.seq_lens.sum()))
    columns = np.stack((mine.rows, mine.seq_lens, mine.query_starts, mine.query_lens), axis=1)
    return ExpandedWork(
        others=(int(rest.query_starts.min()), int(ends.max())) if len(ends) else (0, 0),
        queries_a_tile=each,
        most_rows=most_rows,
        pieces=plan_pieces(columns, each, most_rows, put_any or (lambda words: put(words, len(words)))),
    )


def _few(sequences: Sequences, window: int | None, heads: Heads, put: Put, room: Room | None) -> FewWork:
    starts, items = split_items(sequences, window, heads.split_tokens, heads.chunked_windows)
    count, max_items = len(sequences.rows), len(items)
    max_queries = int(sequences.query_lens.max(initial=1))
    if room is not None:
        # Padding sequences have no items.
        starts = np.concatenate((starts, np.full(room.few - count, max_items)))
        count, max_items, max_queries = room.few, room.items, room.queries
    return FewWork(
        count,
        max_queries,
        max_items,
        *(put(column, count) for column in sequences.padded(count)),
        item_starts=put(starts, count + 1),
        num_items=put(np.array([len(items)]), 1),
        # The kernel reads only the first `num_items` of these.
        items=put(items, max_items),
        split_tokens=heads.split_tokens,
    )


def _many(sequences: Sequences, heads: Heads, put: Put, room: Room | None) -> ManyWork:
    each = heads.queries_a_tile
    tiles, count = query_tiles(sequences, each), len(sequences.rows)
    if room is not None:
        # The further tiles are those of a padding sequence: without queries, they store nothing.
        tiles = np.concatenate((tiles, np.full(room.tiles - len(tiles), count << 16)))
        count = room.many + 1
    columns = (*sequences.padded(count), tiles)
    horizons = sequences.horizons if heads.mutual else None
    return ManyWork(
        len(tiles),
        each,
        *(put(column, len(column)) for column in columns),
        horizons=None if horizons is None else put(horizons, len(horizons)),
    )
