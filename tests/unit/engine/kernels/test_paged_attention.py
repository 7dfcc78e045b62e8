from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from antiphon.services.engine.kernels import paged_attention as kernel
from antiphon.services.engine.kernels.paged_attention import (
    AttentionShape,
    Spans,
    paged_attention,
    plan_attention,
    write_kv,
)

BLOCK_SIZE, NUM_BLOCKS, KV_HEADS, GROUP, HEAD_DIM = 4, 64, 2, 3, 8
SHAPE = AttentionShape(
    block_size=BLOCK_SIZE, bytes_per_slot=KV_HEADS * HEAD_DIM * 4, dtype=torch.float32, device=torch.device("cpu")
)


class Case:
    """Sequences of random keys with (context, queries) lengths, over shuffled blocks."""

    def __init__(self, lengths: list[tuple[int, int]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
        self.counts = np.array([count for _, count in lengths])
        self.seq_lens = np.array([context + count for context, count in lengths])
        self.starts = np.concatenate(([0], self.counts.cumsum()))
        self.keys = [draw(int(n), KV_HEADS, HEAD_DIM) for n in self.seq_lens]
        self.values = [draw(int(n), KV_HEADS, HEAD_DIM) for n in self.seq_lens]
        self.queries = draw(int(self.counts.sum()), KV_HEADS * GROUP, HEAD_DIM)
        widths = -(-self.seq_lens // BLOCK_SIZE)
        ids = np.random.default_rng(seed).permutation(NUM_BLOCKS)
        assert widths.sum() <= NUM_BLOCKS
        self.tables = np.full((len(lengths), int(widths.max())), ids[-1])
        for row, width in enumerate(widths):
            self.tables[row, :width], ids = ids[:width], ids[width:]

    def slots(self, row: int) -> Tensor:
        positions = np.arange(self.seq_lens[row])
        return torch.from_numpy(self.tables[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)

    def run(self, window: int | None, spans: Sequence[Spans] | None = None, shape: AttentionShape = SHAPE) -> Tensor:
        # What was never written must not matter, unless it is not a number: the engine zeroes its caches.
        caches = [torch.full((NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), 1e3) for _ in range(2)]
        for row in range(len(self.counts)):
            write_kv(self.keys[row], self.values[row], caches[0], caches[1], self.slots(row))
        keys, values = (
            torch.cat([x[-count:] for x, count in zip(xs, self.counts.tolist(), strict=True)])
            for xs in (self.keys, self.values)
        )
        batch = plan_attention(self.starts, self.seq_lens, self.tables[None], window, shape, spans)
        return paged_attention(self.queries, keys, values, caches[0], caches[1], batch)

    def expected(
        self, window: int | None, spans: Sequence[Spans] | None = None, shape: AttentionShape = SHAPE
    ) -> Tensor:
        """Query by query, key by key."""
        rows = []
        for row, count in enumerate(self.counts.tolist()):
            for i in range(count):
                position = int(self.seq_lens[row]) - count + i
                first = 0 if window is None else max(0, position - window + 1)
                if window is not None and shape.chunked_windows:
                    first = position // window * window
                ends = [end for start, end in spans[row] if start <= position < end] if spans else []
                end = max([position + 1, *ends])
                query = self.queries[int(self.starts[row]) + i]
                heads = []
                for head in range(KV_HEADS * GROUP):
                    keys, values = (x[row][first:end, head // GROUP] for x in (self.keys, self.values))
                    weights = (keys @ query[head] / HEAD_DIM**0.5).softmax(0)
                    heads.append(weights @ values)
                rows.append(torch.stack(heads))
        return torch.stack(rows)


LENGTHS = st.lists(
    st.tuples(st.integers(0, 20), st.one_of(st.just(1), st.integers(1, 9))).filter(lambda pair: sum(pair) > 0),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(LENGTHS, st.sampled_from([None, 1, 3, 4, 7, 100]), st.integers(0, 99))
def test_any_mixture_of_decodes_and_chunks_is_attention_by_definition(
    lengths: list[tuple[int, int]], window: int | None, seed: int
) -> None:
    case = Case(lengths, seed)
    torch.testing.assert_close(case.run(window), case.expected(window), rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(LENGTHS, st.sampled_from([1, 3, 4, 7, 16, 100]), st.sampled_from([4, 512]), st.integers(0, 99))
def test_a_query_sees_only_keys_of_its_own_chunk(
    lengths: list[tuple[int, int]], chunk: int, tile: int, seed: int
) -> None:
    case, shape = Case(lengths, seed), replace(SHAPE, chunked_windows=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "TILE_QUERIES", tile)
        given = case.run(chunk, shape=shape)
    torch.testing.assert_close(given, case.expected(chunk, shape=shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("context", [0, 6])
def test_a_chunk_of_several_tiles_is_attention_by_definition(
    window: int | None, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "TILE_QUERIES", 4)
    case = Case([(context, 18), (0, 3)])
    torch.testing.assert_close(case.run(window), case.expected(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5, 7])
@pytest.mark.parametrize("tile", [4, 512])
def test_tokens_of_a_span_see_those_behind_them_up_to_its_end(
    window: int | None, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "TILE_QUERIES", tile)
    case = Case([(0, 18), (6, 9), (9, 1), (3, 7), (5, 1)])
    # Of the second and third sequence the step computes the rest of a span whose beginning is in the cache.
    spans = [[(2, 8), (8, 9), (11, 17)], [(1, 3), (4, 12)], [(4, 10)], [], [(0, 3), (20, 30)]]
    torch.testing.assert_close(case.run(window, spans), case.expected(window, spans), rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="cuts a span"):
        case.run(window, [[(16, 19)], *spans[1:]])


def test_sequences_of_different_length_are_decoded_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PADDING_SLOTS_MAX", 8)
    case = Case([(3, 1), (60, 1), (5, 1), (58, 1), (30, 1)])
    batch = plan_attention(case.starts, case.seq_lens, case.tables[None], None, SHAPE)
    assert [decode.count for decode in batch.decodes] == [2, 1, 2]
    torch.testing.assert_close(case.run(None), case.expected(None), rtol=1e-5, atol=1e-5)


def test_gathered_keys_of_a_batch_are_bounded() -> None:
    heavy = replace(SHAPE, bytes_per_slot=kernel.GATHER_BYTES_MAX // 100)
    case = Case([(39, 1)] * 5)
    batch = plan_attention(case.starts, case.seq_lens, case.tables[None], None, heavy)
    assert [decode.count for decode in batch.decodes] == [2, 2, 1]


def test_a_windowed_decode_reads_only_the_blocks_of_its_window() -> None:
    case = Case([(60, 1)])
    batch = plan_attention(case.starts, case.seq_lens, case.tables[None], 6, SHAPE)
    assert batch.decodes[0].blocks.tolist() == [case.tables[0, -3:].tolist()]
