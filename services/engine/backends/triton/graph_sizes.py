"""The sizes of captured graphs, and which steps fit them. See `capacity/graphs` for the two kinds of graphs."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from antiphon.services.engine.backends.triton.kernels.attention.attention_work import (
    FEW_QUERIES,
    Heads,
    Room,
    Sequences,
    has_few,
)
from antiphon.services.engine.backends.triton.kernels.lora import most_tiles
from antiphon.services.engine.kernels.splits import splits_of
from antiphon.services.engine.worker.capacity.graphs import GraphBounds, Reach

_PROMPTS = 16
"""Sequences with many tokens in a mixed step. Each has room for a tile of queries, which takes time if it is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize:
    """The size of a captured graph: tokens, sequences and how long they may be.

    `max_queries`: tokens of a sequence for the decode kernel; `num_prompts`: sequences that may have more, 0 for a
    decode graph, in which every sequence has one token. `num_slots`: number of adapter slots that its steps may use; 0
    for a graph without products of adapters.
    """

    num_tokens: int
    num_seqs: int
    reach: Reach
    max_queries: int = 1
    num_prompts: int = 0
    num_slots: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether it is a decode graph, which gives logits. A mixed graph gives hidden states."""
        return self.num_prompts == 0

    @property
    def max_tiles(self) -> int:
        """Maximum number of tiles of tokens with adapters (see `kernels/lora`)."""
        return most_tiles(self.num_tokens, self.num_slots) if self.num_slots else 0

    def room(self, heads: Heads) -> Room:
        """Returns the room of the work lists of layers with these heads."""
        few, many = (0, self.num_seqs) if heads.one_form else (self.num_seqs, self.num_prompts)
        if self.max_queries > 1 and not has_few(np.array([self.max_queries]), heads, self.max_queries)[0]:
            # The prefill kernel computes sequences with draft tokens.
            many = self.num_seqs
        return Room(
            few=few,
            items=self.reach.max_items(few, heads.split_tokens),
            queries=self.max_queries,
            many=many,
            tiles=self.num_tokens // heads.queries_a_tile + many if many else 0,
        )

    def fits(self, sequences: Sequences, kinds: Iterable[Heads]) -> bool:
        """Whether the work lists have room for sequences, in layers of all kinds."""
        return all(_fit(sequences, heads, self.room(heads)) for heads in kinds)


def _fit(sequences: Sequences, heads: Heads, room: Room) -> bool:
    few = has_few(sequences.query_lens, heads, room.queries)
    count = int(few.sum())
    items = splits_of(sequences.seq_lens[few], heads.split_tokens).sum()
    return count <= room.few and len(few) - count <= room.many and items <= room.items


def decode_sizes(bounds: GraphBounds, num_slots: int) -> list[GraphSize]:
    """Returns the sizes of the decode graphs, ascending."""
    return [
        GraphSize(num_tokens=count, num_seqs=count, reach=bounds.reach, num_slots=num_slots) for count in bounds.decode
    ]


def mixed_sizes(bounds: GraphBounds, num_slots: int) -> list[GraphSize]:
    """Returns the sizes of the mixed graphs, ascending."""
    return [
        GraphSize(
            num_tokens=count,
            num_seqs=min(count, bounds.num_seqs),
            reach=bounds.reach,
            max_queries=min(bounds.max_queries, FEW_QUERIES),
            num_prompts=min(count, bounds.num_seqs, _PROMPTS),
            num_slots=num_slots,
        )
        for count in bounds.mixed
    ]
