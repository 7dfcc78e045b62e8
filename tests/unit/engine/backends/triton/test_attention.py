"""Both attention kernels against the reference: lengths around every border, groups, windows, caps, biases, types."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.attention import attention_work
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import (
    DeviceWork,
    Geometry,
    Room,
    Sequences,
    plan_work,
    query_tiles,
    split_items,
)
from antiphon.services.engine.backends.triton.kernels.attention.decode_attention import attend_few
from antiphon.services.engine.backends.triton.kernels.attention.prefill_attention import attend_many
from antiphon.services.engine.kernels.alibi import alibi_slopes
from antiphon.services.engine.kernels.paged_attention import (
    AttentionShape,
    Scores,
    Spans,
    paged_attention,
    plan_attention,
)
from antiphon.services.engine.kernels.splits import LONG_SPLIT, SHORT_SPLITS, SPLIT_TOKENS
from antiphon.services.engine.kernels.storage import as_stored
from antiphon.services.engine.models.description import LatentAttention
from tests.unit.engine.backends.triton.close import assert_close

BLOCK_SIZE = 16
DECODES = [(0, 1), (15, 1), (SPLIT_TOKENS - 1, 1), (SPLIT_TOKENS + 9, 1)]
"""(computed, queries): alone, a block full, a split full, over two splits."""


@dataclass(frozen=True)
class Heads:
    """Sizes of a model's attention."""

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    chunked: bool = False
    shared: bool = False
    """Whether the cache is a part of a tensor that other layers share."""
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    block_size: int = BLOCK_SIZE
    one_form: bool = False


def put(array: np.ndarray, capacity: int) -> Tensor:
    """Rubbish behind what there is: a kernel must not read it."""
    out = np.full(capacity, 99_999, dtype=np.int32)
    out[: len(array)] = array
    return torch.from_numpy(out)


class Case:
    """Sequences of random keys with (computed, queries) lengths in shuffled blocks and shuffled rows of the tables."""

    def __init__(self, lengths: list[tuple[int, int]], heads: Heads, spans: list[Spans] | None = None) -> None:
        """`spans`: those of each sequence whose tokens attend to each other."""
        self.heads, self.spans = heads, spans
        generator = torch.Generator().manual_seed(len(lengths))
        query_lens = np.array([queries for _, queries in lengths])
        seq_lens = np.array([computed + queries for computed, queries in lengths])
        widths = -(-seq_lens // heads.block_size)
        num_blocks = int(widths.sum()) + 2
        order, ids = (
            np.random.default_rng(3).permutation(len(lengths)),
            np.random.default_rng(5).permutation(num_blocks),
        )
        # Ids of blocks that are not a sequence's are far out of range.
        self.tables = np.full((len(lengths) + 1, int(widths.max())), 2**30, dtype=np.int32)
        for row, width in zip(order, widths, strict=True):
            self.tables[row, :width], ids = ids[:width], ids[width:]
        starts = np.concatenate(([0], query_lens.cumsum()))[:-1]
        self.sequences = Sequences(order, seq_lens, starts, query_lens)
        if spans is not None:
            horizons = np.concatenate([np.arange(end - n, end) for end, n in zip(seq_lens, query_lens, strict=True)])
            for start, end, n, of in zip(starts, seq_lens, query_lens, spans, strict=True):
                for first, behind in of:
                    own = horizons[start : start + n]
                    own[max(0, first - (end - n)) : max(0, behind - (end - n))] = behind - 1
            self.sequences = replace(self.sequences, horizons=horizons)
        num_heads = heads.kv_heads * heads.group
        # Queries lie in rows with keys and values behind them, as the product leaves them.
        wide = torch.randn(int(query_lens.sum()), num_heads + 2, heads.head_dim, generator=generator).to(heads.dtype)
        self.queries = wide[:, :num_heads]
        width, first = heads.kv_heads * heads.head_dim, 32 if heads.shared else 0
        shape = (num_blocks, heads.block_size, width + 2 * first)
        caches = [torch.randn(shape, generator=generator).to(heads.dtype) for _ in range(2)]
        stored = [as_stored(cache, heads.cache_dtype or heads.dtype) for cache in caches]
        own = [cache[..., first : first + width] for cache in stored]
        self.caches = [cache.unflatten(2, (heads.kv_heads, heads.head_dim)) for cache in own]

    def work_heads(self) -> attention_work.Heads:
        heads = self.heads
        return attention_work.Heads(
            group=heads.group,
            head_dim=heads.head_dim,
            itemsize=heads.dtype.itemsize,
            stored_itemsize=(heads.cache_dtype or heads.dtype).itemsize,
            chunked_windows=heads.chunked,
            one_form=heads.one_form,
            mutual=self.spans is not None,
        )

    def sinks(self) -> Tensor | None:
        """From far below the scores of keys to far above them."""
        return torch.linspace(-9, 9, self.heads.kv_heads * self.heads.group) if self.heads.sinks else None

    def ours(self, room: Room | None = None, padding: int = 0) -> Tensor:
        heads = self.heads
        work = plan_work(self.sequences, torch.from_numpy(self.tables), heads.window, self.work_heads(), put, room)
        attended = torch.full((len(self.queries) + padding, *self.queries.shape[1:]), 7.0, dtype=heads.dtype)
        slopes = alibi_slopes(heads.kv_heads * heads.group) if heads.alibi else None
        geometry = Geometry(
            kv_heads=heads.kv_heads,
            scale=heads.head_dim**-0.5,
            softcap=heads.softcap,
            slopes=slopes,
            sinks=self.sinks(),
        )
        self.attend(work, attended, geometry)
        return attended

    def attend(self, work: DeviceWork, attended: Tensor, geometry: Geometry) -> None:
        if work.few is not None:
            attend_few(self.queries, self.caches[0], self.caches[1], attended, work, geometry)
        if work.many is not None:
            attend_many(self.queries, self.caches[0], self.caches[1], attended, work, geometry)

    def expected(self) -> Tensor:
        """The reference, in float32 where it has no better."""
        heads, sequences = self.heads, self.sequences
        slopes = alibi_slopes(heads.kv_heads * heads.group).view(heads.kv_heads, -1) if heads.alibi else None
        shape = AttentionShape(
            block_size=heads.block_size,
            bytes_per_slot=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            alibi_slopes=slopes,
            chunked_windows=heads.chunked,
        )
        tables = np.where(self.tables == 2**30, 0, self.tables)[sequences.rows].astype(np.int64)
        starts = np.concatenate((sequences.query_starts, [len(self.queries)]))
        batch = plan_attention(starts, sequences.seq_lens, tables[None], heads.window, shape, self.spans)
        keys, values = (cache.to(torch.float32) for cache in self.caches)
        # The step's own keys and values, which the reference reads for prompts without a prefix.
        places = [
            (sequences.rows[i], p)
            for i in range(len(sequences.rows))
            for p in range(sequences.seq_lens[i] - sequences.query_lens[i], sequences.seq_lens[i])
        ]
        size = heads.block_size
        slots = [int(self.tables[row, p // size]) * size + p % size for row, p in places]
        own_keys, own_values = (cache.flatten(0, 1)[slots] for cache in (keys, values))
        scores = Scores(None, heads.softcap, self.sinks())
        out = paged_attention(self.queries.to(torch.float32), own_keys, own_values, keys, values, batch, scores)
        return out.to(heads.dtype)

    def check(self, factor: float = 1.0) -> None:
        assert_close(self.ours(), self.expected(), factor)


VARIANTS = [
    Heads(),
    Heads(kv_heads=1, group=3, head_dim=24),
    Heads(window=20, block_size=64),
    Heads(group=1, window=20),
    Heads(group=7, window=SPLIT_TOKENS + 3),
    Heads(softcap=2.0, window=33),
    Heads(alibi=True),
    Heads(sinks=True, group=4, window=SPLIT_TOKENS + 3),
    Heads(sinks=True, window=20),
    Heads(group=3, window=SPLIT_TOKENS + 3, chunked=True),
    Heads(window=20, chunked=True),
    Heads(dtype=torch.float16),
    Heads(dtype=torch.bfloat16, window=70),
    Heads(dtype=torch.float16, cache_dtype=torch.float8_e4m3fn),
    Heads(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn),
    Heads(cache_dtype=torch.float8_e5m2),
    Heads(shared=True, window=20),
    Heads(shared=True, group=4, head_dim=24, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn),
    Heads(kv_heads=1, group=8, head_dim=512, dtype=torch.bfloat16),
    Heads(kv_heads=1, group=4, head_dim=512, shared=True, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn),
]


@pytest.mark.parametrize("heads", VARIANTS, ids=str)
def test_decoding_sequences_attend_to_what_the_reference_does(heads: Heads) -> None:
    Case(DECODES, heads).check()


@pytest.mark.parametrize("heads", VARIANTS, ids=str)
def test_chunks_beside_decoding_sequences_attend_to_what_the_reference_does(heads: Heads) -> None:
    Case([(5, 40), (30, 1), (3, 3), (0, 17)], heads).check()


def test_a_chunk_of_several_tiles_of_queries_and_keys_attends_to_what_the_reference_does() -> None:
    Case([(100, 70), (0, 64), (63, 65)], Heads(window=90)).check()
    Case([(100, 70), (0, 64), (63, 65)], Heads(window=90, chunked=True)).check()


@pytest.mark.parametrize(
    "heads",
    [Heads(), Heads(window=20), Heads(group=7, head_dim=24, window=70), Heads(window=33, one_form=True)],
    ids=str,
)
def test_tokens_of_an_image_attend_to_each_other(heads: Heads) -> None:
    """Images that begin with a prompt, lie in several tiles, end it, and of which a few tokens are left to compute."""
    lengths = [(0, 90), (3, 70), (29, 4), (12, 1), (5, 40), (30, 1)]
    spans: list[Spans] = [[(0, 20), (25, 89)], [(40, 73)], [(17, 33)], [(3, 13)], [], []]
    case = Case(lengths, heads, spans)
    case.check()
    work = plan_work(case.sequences, torch.zeros(1), heads.window, case.work_heads(), put)
    assert work.few is None if heads.one_form else work.few is not None and work.few.count == 2


def test_steps_without_images_have_the_bits_of_a_model_without_any() -> None:
    lengths, heads = [(5, 40), (30, 1), (0, 17)], Heads(window=20)
    assert torch.equal(Case(lengths, heads, [[], [], []]).ours(), Case(lengths, heads).ours())


LONG = SHORT_SPLITS * SPLIT_TOKENS


@pytest.mark.parametrize("window", [None, LONG_SPLIT * SPLIT_TOKENS])
def test_a_sequence_with_long_splits_attends_to_what_the_reference_does(window: int | None) -> None:
    """The first ends in the second long split, the others just before and behind the first."""
    lengths = [(LONG + LONG_SPLIT * SPLIT_TOKENS + 9, 1), (LONG - 1, 1), (LONG, 1)]
    Case(lengths, Heads(kv_heads=1, window=window, block_size=64)).check()


@pytest.mark.parametrize("queries", [2, 5, 9])
def test_guesses_are_checked_by_the_kernel_for_few_queries(queries: int) -> None:
    case = Case([(SPLIT_TOKENS - 3, queries), (0, 1), (7, queries - 1)], Heads(window=40))
    assert plan_work(case.sequences, torch.zeros(1), 40, case.work_heads(), put).many is None
    case.check()


def test_a_sequence_gets_the_same_bits_whatever_is_beside_it() -> None:
    lengths = [(SPLIT_TOKENS + 9, 1), (400, 1), (20, 1)]
    together = Case(lengths, Heads())
    crowded = together.ours(Room(few=5, items=40, queries=1, many=0, tiles=0))
    alone = replace(together.sequences.take(np.array([0])))
    together.sequences = alone
    assert torch.equal(together.ours()[0], crowded[0])


@pytest.mark.parametrize("queries", [1, 3, 9])
def test_places_of_a_graph_without_a_sequence_read_and_store_nothing(queries: int) -> None:
    decodes, chunks = DECODES[:3], [(30, 3), (9, 9), (0, 70)]
    room = Room(few=6, items=50, queries=queries, many=4, tiles=12)
    for shares in (decodes, decodes + chunks, chunks[2:]):
        case = Case(shares, Heads())
        attended = case.ours(room, padding=5)
        assert_close(attended[:-5], case.expected())
        assert (attended[-5:] == 7.0).all()


def test_wide_heads_are_computed_in_fewer_rows_at_a_time() -> None:
    usual = attention_work.Heads(group=8, head_dim=256, itemsize=2, stored_itemsize=1)
    wide = replace(usual, head_dim=512, stored_itemsize=2)
    assert [heads.queries_a_tile for heads in (usual, wide, replace(wide, stored_itemsize=1))] == [16, 8, 4]
    assert [heads.few_rows for heads in (usual, wide, replace(wide, stored_itemsize=1))] == [64, 32, 16]
    latent = LatentAttention(rank=448, rope_dim=64, nope_dim=128, value_dim=128)
    assert replace(wide, latent=latent).queries_a_tile == 16


def test_the_lists_name_every_split_and_every_tile_once() -> None:
    sequences = Sequences(np.arange(3), np.array([600, 1, 257]), np.array([0, 1, 2]), np.array([1, 1, 1]))
    starts, items = split_items(sequences, None)
    assert starts.tolist() == [0, 3, 4, 6]
    assert [(i >> 16, i & 0xFFFF) for i in items] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    starts, items = split_items(sequences, 100)
    assert [(i >> 16, i & 0xFFFF) for i in items] == [(0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    starts, items = split_items(sequences, 256, chunked=True)
    assert [(i >> 16, i & 0xFFFF) for i in items] == [(0, 2), (1, 0), (2, 1)]
    long = Sequences(np.arange(3), np.array([LONG, LONG + 1, LONG + 1025]), np.arange(3), np.ones(3, dtype=np.int64))
    starts, items = split_items(long, 1025)
    assert np.diff(starts).tolist() == [5, 5, 2]
    assert [(i >> 16, i & 0xFFFF) for i in items[10:]] == [(2, 64), (2, 65)]
    chunks = Sequences(np.arange(2), np.array([50, 400]), np.array([0, 50]), np.array([50, 100]))
    tiles = [(i >> 16, i & 0xFFFF) for i in query_tiles(chunks, 32)]
    assert tiles == [(1, 3), (1, 2), (1, 1), (1, 0), (0, 1), (0, 0)]
