"""Latent attention of whole steps against the reference layer: both forms, pieces of contexts, rotations, types."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.triton.kernels.attention import expanded_work
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import Sequences, plan_work, work_kinds
from antiphon.services.engine.backends.triton.kernels.attention.expanded_work import Pieces, expands, plan_pieces
from antiphon.services.engine.backends.triton.latent import TritonLatentAttention
from antiphon.services.engine.kernels.paged_attention import AttentionShape, plan_attention
from antiphon.services.engine.kernels.storage import as_stored
from antiphon.services.engine.models.description import DecoderDescription, LatentAttention, QueryGrowth
from antiphon.services.engine.models.layers.attention import StepInputs
from antiphon.services.engine.models.layers.latent_attention import LatentWeights, ReferenceLatentAttention
from antiphon.services.engine.models.registry import find_family
from tests.model.test_latent_attention import DEEPSEEK_V3
from tests.support.slow import slow_but
from tests.unit.engine.backends.triton.close import assert_close
from tests.unit.engine.backends.triton.test_attention import put

HEADS, BLOCK_SIZE, POSITIONS = 3, 16, 512
SMALL = {
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "q_lora_rank": None,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
MIXED = [(5, 40), (0, 130), (30, 1), (100, 70), (200, 12), (3, 3), (63, 65)]
"""(computed, queries): one that decodes, drafts, and chunks, of which one is not expanded."""
V3 = LatentAttention(rank=512, rope_dim=64, nope_dim=128, value_dim=128)


@dataclass(frozen=True)
class Kind:
    """What differs between models and caches."""

    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None
    interleaved: bool = True
    growth: QueryGrowth | None = None


def described(kind: Kind) -> DecoderDescription:
    config: dict[str, Any] = {**DEEPSEEK_V3, **SMALL, "rope_interleave": kind.interleaved}
    return replace(find_family(config).describe(config), query_growth=kind.growth)


class Step:
    """The inputs of a step: sequences in shuffled blocks, whose contexts are in the cache."""

    def __init__(self, kind: Kind, lengths: list[tuple[int, int]]) -> None:
        self.kind, self.description = kind, described(kind)
        latent = self.description.latent
        assert latent is not None
        generator = torch.Generator().manual_seed(len(lengths))
        self.computed, self.counts = (np.array(column) for column in zip(*lengths, strict=True))
        widths = -(-(self.computed + self.counts) // BLOCK_SIZE)
        ids = np.random.default_rng(2).permutation(int(widths.sum()))
        self.tables = np.zeros((len(lengths), int(widths.max())), dtype=np.int64)
        for row, width in enumerate(widths):
            self.tables[row, :width], ids = ids[:width], ids[width:]
        self.starts = np.concatenate(([0], self.counts.cumsum()))
        positions = [np.arange(c, c + q) for c, q in lengths]
        self.positions = np.concatenate(positions)
        self.slots = np.concatenate(
            [self.tables[row, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for row, p in enumerate(positions)]
        )
        queries = HEADS * latent.query_dim
        self.qkv = torch.randn(len(self.slots), queries + latent.row_size, generator=generator).to(kind.dtype)
        shape = int(widths.sum()), BLOCK_SIZE, 1, latent.row_size
        self.cache = as_stored(torch.randn(shape, generator=generator), kind.cache or kind.dtype)
        up = torch.randn(HEADS, latent.nope_dim + latent.value_dim, latent.rank, generator=generator)
        norm = torch.rand(latent.rank, generator=generator) + 0.5
        self.weights = LatentWeights(norm.to(kind.dtype), (up * latent.rank**-0.5).to(kind.dtype))

    def ours(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attended values, and the cache behind the step."""
        d, like, cache = self.description, self.qkv.new_empty(0), self.cache.clone()
        [(_, heads)] = work_kinds(d, like.dtype.itemsize, cache.dtype.itemsize)
        sequences = Sequences(np.arange(len(self.counts)), self.computed + self.counts, self.starts[:-1], self.counts)
        work = plan_work(sequences, torch.from_numpy(self.tables.astype(np.int32)), None, heads, put)
        self.work = work
        layer = TritonLatentAttention(d, heads.latent, (self.weights,), like, POSITIONS)  # type: ignore[arg-type]
        slots = torch.from_numpy(self.slots.astype(np.int32))[None]
        positions = torch.from_numpy(self.positions.astype(np.int32))
        inputs = StepInputs(slot_mapping=slots, attention={0: work}, key_caches=(cache,), value_caches=())
        return layer.attend(0, self.qkv.clone(), layer.prepare(positions), inputs), cache

    def expected(self, cache: torch.Tensor) -> torch.Tensor:
        """The reference in float32, with the rows that our kernels stored."""
        d, latent = self.description, self.description.latent
        assert latent is not None
        like = torch.empty(0)
        shape = AttentionShape(block_size=BLOCK_SIZE, bytes_per_slot=1, dtype=like.dtype, device=like.device)
        batch = plan_attention(self.starts, self.computed + self.counts, self.tables[None], None, shape)
        weights = LatentWeights(self.weights.norm.float(), self.weights.up.float())
        layer = ReferenceLatentAttention(d, latent, (weights,), like)
        # Its own rows, which may be rounded otherwise, go behind the blocks that it reads.
        slots = torch.arange(len(self.slots)) + cache.shape[0] * BLOCK_SIZE
        spare = torch.zeros(len(self.slots), *cache.shape[1:])
        inputs = StepInputs(
            slot_mapping=slots[None],
            attention={None: batch},
            key_caches=(torch.cat((cache.float(), spare)),),
            value_caches=(),
        )
        return layer.attend(0, self.qkv.float(), layer.prepare(torch.from_numpy(self.positions)), inputs)

    def check(self, factor: float = 1.0) -> None:
        attended, cache = self.ours()
        assert_close(attended, self.expected(cache).to(attended.dtype), factor)


KINDS = [
    Kind(),
    Kind(interleaved=False, growth=QueryGrowth(rate=0.3, length=64)),
    Kind(torch.float16),
    Kind(torch.bfloat16),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sequences_of_both_forms_attend_to_what_the_reference_does(kind: Kind) -> None:
    step = Step(kind, MIXED)
    step.check(2.0)
    assert step.work.few is not None
    assert step.work.many is not None
    assert step.work.expanded is not None
    assert len(step.work.expanded.pieces) == 1
    # The sequences between the first and the last one of the absorbed form are multiplied too.
    assert step.work.expanded.others == (170, 256)


@pytest.mark.parametrize("rows", slow_but([100], [17, 64, 100, 300]))
def test_pieces_of_contexts_give_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pieces, "num_rows", lambda _self, _total: rows)
    step = Step(Kind(), MIXED)
    step.check(2.0)
    assert step.work.expanded is not None
    assert len(step.work.expanded.pieces) == -(-(45 + 130 + 170 + 128) // rows)


def test_a_step_of_prompts_alone_is_expanded_and_one_that_decodes_is_not() -> None:
    prompts = Step(Kind(), [(0, 40), (0, 33)])
    prompts.check(2.0)
    assert prompts.work.few is prompts.work.many is None
    decodes = Step(Kind(), [(40, 1), (3, 2)])
    decodes.check(2.0)
    assert decodes.work.many is decodes.work.expanded is None


def test_rows_of_an_8_bit_cache_are_expanded() -> None:
    """Behind contexts: of other prompts the reference does not read the rows from the cache."""
    Step(Kind(torch.float16, torch.float8_e4m3fn), [(100, 70), (30, 1)]).check(2.0)


def test_the_form_with_fewer_products_is_taken() -> None:
    """DeepSeek V3: 512 * 256 products make a row's key and value, each pair of query and row then saves 768."""
    for context, least in ((0, 1), (1000, 159), (100_000, 171)):
        counts = np.arange(1, 400)
        taken = expands(counts, np.full(len(counts), context), V3)
        products = counts * (context + counts / 2)
        absorbed, expanded = products * 1088 + counts * 512 * 256, products * 320 + (context + counts) * 512 * 256
        assert np.array_equal(taken, absorbed > expanded)
        assert counts[taken][0] == least


def test_pieces_fit_the_memory_of_the_absorbed_form() -> None:
    memory = Pieces(latent=V3, heads=128, itemsize=2, num_tokens=8192)
    absorbed = 8192 * 128 * 2 * 512 * 2
    assert memory.num_bytes == pytest.approx(absorbed, rel=1e-4)
    assert memory.num_rows(30_000) == 30_000
    rows = memory.num_rows(160_000)
    row, sums = (128 * 256 + 576) * 2, 8192 * 128 * 130 * 4
    assert rows * row + sums <= absorbed < (rows + 1) * row + sums
    # Steps of few tokens have no short pieces.
    small, usual = replace(memory, num_tokens=20), replace(memory, num_tokens=2048)
    assert small.num_rows(10**6) == usual.num_rows(10**6) > 4096
    narrow = LatentAttention(rank=16, rope_dim=8, nope_dim=64, value_dim=64)
    assert replace(memory, latent=narrow, heads=2, num_tokens=4096).num_rows(10**6) >= 4096


def test_pieces_have_every_visible_key_of_every_tile_once() -> None:
    columns = np.array([[4, 70, 0, 70], [1, 50, 70, 20]])
    words = list[Any]()

    def keep(array: np.ndarray) -> torch.Tensor:
        words.append(array)
        return torch.from_numpy(array)

    pieces = plan_pieces(columns, 32, 50, keep)
    assert len(words) == 1
    assert [(piece.num_segments, piece.num_rows, piece.most_keys) for piece in pieces] == [
        (1, 50, 50),
        (2, 50, 30),
        (1, 20, 20),
    ]
    segments = [piece.segments.view(-1, expanded_work.SEGMENT_WORDS)[:, :7].tolist() for piece in pieces]
    assert segments == [
        [[4, 70, 0, 70, 0, 50, 0]],
        [[4, 70, 0, 70, 50, 20, 0], [1, 50, 70, 20, 0, 30, 20]],
        [[1, 50, 70, 20, 30, 20, 0]],
    ]
    tiles = [[(tile >> 16, tile & 0xFFFF) for tile in piece.tiles.tolist()] for piece in pieces]
    # The first 32 queries see no key from 50 on; tiles that see most keys come first.
    assert tiles == [[(0, 1), (0, 2), (0, 0)], [(1, 0), (0, 2), (0, 1)], [(0, 0)]]
