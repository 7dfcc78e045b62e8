"""Which sequences of a step attend to keys and values that are computed from latents (expanded), and in which pieces.

A pair of a query and a key takes 2 · rank + rope_dim products per head in the absorbed form, and nope_dim + rope_dim +
value_dim in the expanded one: 1088 and 320 for DeepSeek V3. Besides, each row of the context takes rank · (nope_dim +
value_dim) products per head to be expanded. The rows of the queries themselves are expanded too, but their queries and
outputs are not multiplied by W_key and W_value, which takes just as many. So the expanded form takes fewer products if

    pairs · (2 · rank - nope_dim - value_dim)  >  context · rank · (nope_dim + value_dim)

with queries · (context + queries / 2) pairs: for DeepSeek V3 always without a context, and for at least 171 queries
behind a context of any length (`expands`).

The rows of all such sequences, one after another, are divided into pieces. The keys and values of a piece lie in the
memory that the absorbed form of the step would take, so that the peak does not depend on contexts or on the choice of
forms (`Pieces`). A piece is expanded and all tiles of queries that see some of its keys attend to it. What a tile has
summed so far is kept between pieces as float32.

Plain index arithmetic on the host, called by `attention_work`; the kernels are in `expanded_attention`.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.models.description import LatentAttention

Integers = NDArray[np.int64]

SEGMENT_WORDS: Final = 8
"""Words of a segment: row in the block tables, number of tokens of the sequence, first query, number of queries, first
key, number of keys, first row in the piece; one is not used.
"""
_ALIGNED_WORDS = 4
_ALIGNED_BYTES = 256
_LEAST_TOKENS = 2048
"""A step of fewer tokens has as much memory as one of so many, or its pieces would be short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The memory of latent attention in a step of `num_tokens` tokens, in bytes, and how many rows a piece has.

    Either the absorbed queries and what they attend to, or the rows, keys and values of a piece and, if there are
    several, the sums of all queries (`value_dim` + 2 numbers in float32).
    """

    latent: LatentAttention
    heads: int
    itemsize: int
    num_tokens: int
    least: int = _LEAST_TOKENS

    @property
    def num_bytes(self) -> int:
        """Size of the memory, with room to align what is in it."""
        return self._usable + 8 * _ALIGNED_BYTES

    def num_rows(self, total: int) -> int:
        """Returns the most rows of a piece if all pieces together have `total` rows."""
        if total * self._row <= self._usable:
            return total
        return (self._usable - self._tokens * self._sums) // self._row

    @property
    def _tokens(self) -> int:
        return max(self.num_tokens, self.least)

    @property
    def _usable(self) -> int:
        return self._tokens * max(self.heads * 2 * self.latent.rank * self.itemsize, self._sums + self._row)

    @property
    def _sums(self) -> int:
        return self.heads * (self.latent.value_dim + 2) * 4

    @property
    def _row(self) -> int:
        a = self.latent
        return (self.heads * (a.nope_dim + a.value_dim) + a.row_size) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows that are expanded together. A segment is a run of keys of one sequence.

    `segments` [num_segments, SEGMENT_WORDS], `tiles` [num_tiles]: packed (segment, tile of queries) pairs, int32 on the
    device. `most_keys`: of a segment.
    """

    num_segments: int
    num_tiles: int
    num_rows: int
    most_keys: int
    segments: Tensor
    tiles: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedWork:
    """The sequences of a step whose latents are expanded. `others`: first token of the other sequences, and end."""

    others: tuple[int, int]
    queries_a_tile: int
    most_rows: int
    pieces: tuple[Piece, ...]


def expands(query_lens: Integers, contexts: Integers, latent: LatentAttention) -> NDArray[np.bool_]:
    """Returns for each sequence whether expanded keys and values take fewer products, see the module."""
    made = latent.nope_dim + latent.value_dim
    return query_lens * (2 * contexts + query_lens) * (2 * latent.rank - made) > 2 * contexts * latent.rank * made


def plan_pieces(columns: Integers, each: int, most_rows: int, put: Any) -> tuple[Piece, ...]:
    """Returns the pieces, of at most `most_rows` rows, of sequences [S, 4], which have the first words of a segment.

    `each`: queries of a tile. `put(words)` copies an array to the device.
    """
    seq_lens, query_lens = columns[:, 1], columns[:, 3]
    ends = seq_lens.cumsum()
    starts, made = ends - seq_lens, list[tuple[Integers, Integers]]()
    for first in range(0, int(ends[-1]), most_rows):
        inside = np.flatnonzero((ends > first) & (starts < first + most_rows))
        first_keys = np.maximum(first - starts[inside], 0)
        num_keys = np.minimum(first + most_rows - starts[inside], seq_lens[inside]) - first_keys
        segments = np.zeros((len(inside), SEGMENT_WORDS), dtype=np.int64)
        segments[:, :4], segments[:, 4], segments[:, 5] = columns[inside], first_keys, num_keys
        segments[:, 6] = starts[inside] + first_keys - first
        made.append((segments, _tiles(seq_lens[inside], query_lens[inside], first_keys, num_keys, each)))
    placed = put(np.concatenate([_aligned(part.ravel()) for pair in made for part in pair]))
    return tuple(_placed(made, placed))


def _tiles(seq_lens: Integers, query_lens: Integers, first_keys: Integers, num_keys: Integers, each: int) -> Integers:
    """Returns the packed tiles that see a key of their segment. Those that see most come first, to balance load."""
    counts = -(-query_lens // each)
    owner = np.repeat(np.arange(len(counts)), counts)
    tiles = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
    last = (seq_lens - query_lens)[owner] + np.minimum((tiles + 1) * each, query_lens[owner]) - 1
    seen = np.minimum(last + 1 - first_keys[owner], num_keys[owner])
    order = np.argsort(-seen, kind="stable")
    return (owner << 16 | tiles)[order][seen[order] > 0]


def _aligned(words: Integers) -> Integers:
    """Pads words, so that those behind them begin at an aligned address: others need another variant of the kernels."""
    return np.concatenate((words, np.zeros(-len(words) % _ALIGNED_WORDS, dtype=np.int64)))


def _placed(made: list[tuple[Integers, Integers]], words: Tensor) -> list[Piece]:
    pieces, place = list[Piece](), 0
    for segments, tiles in made:
        middle = place + segments.size
        pieces.append(
            Piece(
                num_segments=len(segments),
                num_tiles=len(tiles),
                num_rows=int(segments[:, 5].sum()),
                most_keys=int(segments[:, 5].max()),
                segments=words[place:middle],
                tiles=words[middle : middle + len(tiles)],
            )
        )
        place = middle + len(_aligned(tiles))
    return pieces
