"""Soft caps, scales and linear biases of the paged attention, against dense attention."""

import numpy as np
import pytest
import torch
from torch import Tensor

from antiphon.services.engine.kernels import paged_attention as kernel
from antiphon.services.engine.kernels.alibi import alibi_slopes
from antiphon.services.engine.kernels.paged_attention import (
    AttentionShape,
    Scores,
    paged_attention,
    plan_attention,
    write_kv,
)

BLOCK_SIZE, KV_HEADS, GROUP, HEAD_DIM = 4, 2, 3, 8
SLOPES = alibi_slopes(KV_HEADS * GROUP)
LENGTHS = ((0, 7), (5, 9), (11, 1), (0, 1), (3, 1), (0, 13))
"""(context, queries) of each sequence: prompts, continued prompts and decodes."""


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None, scores: Scores, biased: bool) -> Tensor:
    """Queries [n, heads, dims] are the last of the keys [m, kv_heads, dims]."""
    k, v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
    raw = torch.einsum("qhd,khd->hqk", q, k) * (scores.scale or HEAD_DIM**-0.5)
    if scores.softcap is not None:
        raw = scores.softcap * torch.tanh(raw / scores.softcap)
    distances = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
    if biased:
        raw = raw + SLOPES[:, None, None] * distances
    hidden = distances > 0 if window is None else (distances > 0) | (distances <= -window)
    return torch.einsum("hqk,khd->qhd", raw.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scores", [Scores(), Scores(0.7), Scores(softcap=1.5), Scores(0.4, 0.9)])
@pytest.mark.parametrize("lengths", [LENGTHS, ((6, 1), (19, 1)), ((0, 14),)])
def test_any_scores_are_those_of_dense_attention(
    lengths: tuple[tuple[int, int], ...],
    scores: Scores,
    biased: bool,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "BIASED_TILE_QUERIES", 4)
    slopes = SLOPES.view(KV_HEADS, GROUP) if biased else None
    shape = AttentionShape(
        block_size=BLOCK_SIZE, bytes_per_slot=64, dtype=torch.float32, device=torch.device("cpu"), alibi_slopes=slopes
    )
    counts, seq_lens = np.array([n for _, n in lengths]), np.array([sum(pair) for pair in lengths])
    starts = np.concatenate(([0], counts.cumsum()))
    width = int(-(-seq_lens.max() // BLOCK_SIZE))
    tables = np.arange(len(lengths) * width).reshape(len(lengths), width)
    caches = [torch.zeros(tables.size, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2)]
    keys, values = ([torch.randn(int(n), KV_HEADS, HEAD_DIM) for n in seq_lens] for _ in range(2))
    queries = torch.randn(int(counts.sum()), KV_HEADS * GROUP, HEAD_DIM)
    for row in range(len(lengths)):
        write_kv(keys[row], values[row], caches[0], caches[1], row * width * BLOCK_SIZE + torch.arange(len(keys[row])))
    new = [torch.cat([x[-n:] for x, n in zip(xs, counts.tolist(), strict=True)]) for xs in (keys, values)]
    given = paged_attention(
        queries,
        new[0],
        new[1],
        caches[0],
        caches[1],
        plan_attention(starts, seq_lens, tables[None], window, shape),
        scores,
    )
    parts = queries.split(counts.tolist())
    expected = [dense(q, k, v, window, scores, biased) for q, k, v in zip(parts, keys, values, strict=True)]
    torch.testing.assert_close(given, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    expected = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert alibi_slopes(6).tolist() == expected
