"""Attention over a paged cache of latents, from which keys and values of all heads are computed (arXiv 2405.04434).

    cache     [num_blocks, block_size, 1, rank + rope_dim], one a layer: a row is a latent c and a rotated key r
    queries   [num_tokens, heads, nope_dim + rope_dim], the last rope_dim numbers rotated; one is (q, s)
    up        [heads, nope_dim + value_dim, rank]: W_key and W_value of each head

The score of a query (q, s) and a row (c, r) is q · W_key c + s · r, and the value of the row is W_value c. There are
two ways to compute this:

    absorbed   q · W_key c = (W_keyᵀ q) · c: rows are keys and values of one head that all query heads share, and
               W_value is applied to the attention output. Rows are used directly, without conversion
    expanded   keys and values of each head are computed from the rows, which is more work for each row and less for
               each pair of a query and a row. It is cheaper for tiles with many queries (`expands`)

The sequences of a step are planned by `paged_attention.plan_attention`. Called by the decoder's latent attention.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.kernels.paged_attention import (
    AttentionBatch,
    ChunkTile,
    Scores,
    attend,
    gather_tile,
    paged_attention,
    rounded,
)


def latent_attention(
    queries: Tensor, rows: Tensor, cache: Tensor, up: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """Returns the attention output [num_tokens, heads, value_dim].

    `rows` [num_tokens, rank + rope_dim]: those of the step's tokens; they must already be in the cache.
    """
    rank = up.shape[2]
    rope_dim = rows.shape[1] - rank
    scores = Scores(scale)
    key_up, value_up = up.split((queries.shape[2] - rope_dim, up.shape[1] + rope_dim - queries.shape[2]), dim=1)
    wide, few = [], []
    for tile in batch.tiles:
        (wide if expands(tile.end - tile.start, up) else few).append(tile)
    narrow = AttentionBatch(batch.decodes, tuple(few))
    if narrow.decodes or narrow.tiles:
        plain, turned = queries.split((key_up.shape[1], rope_dim), dim=2)
        absorbed = torch.cat((_by_head(plain, key_up), turned), dim=2)
        keys = rows.unsqueeze(1)
        attended = paged_attention(absorbed, keys, keys, cache, cache, narrow, scores)
        output = _by_head(attended[..., :rank], value_up.transpose(1, 2))
    else:
        output = queries.new_empty((*queries.shape[:2], value_up.shape[1]))
    for tile in wide:
        output[tile.start : tile.end] = _expanded(queries[tile.start : tile.end], rows, cache, up, tile, scores)
    return output


def expands(num_queries: int, up: Tensor) -> bool:
    """Whether keys and values are computed from the rows (expanded) for a tile with this many queries.

    Number of multiplications per row and head: absorbed, 2 * rank for each query; expanded, key width + value width for
    each query, plus rank * (key width + value width) to compute the row's key and value. The rotated part is the same
    in both.
    """
    width, rank = up.shape[1:]
    return num_queries * (2 * rank - width) > rank * width


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """Returns x [n, heads, a] times the matrix [heads, a, b] of each head, [n, heads, b]."""
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)


def _expanded(queries: Tensor, rows: Tensor, cache: Tensor, up: Tensor, tile: ChunkTile, scores: Scores) -> Tensor:
    """Returns the output of a tile's queries [num_queries, heads, value_dim]."""
    if tile.blocks is None:
        seen = rounded(rows[tile.key_start : tile.key_start + tile.num_keys], cache.dtype)
    else:
        seen = gather_tile(cache, tile, queries.dtype)[0]
    heads, width, rank = up.shape
    rope_dim, query_dim = seen.shape[1] - rank, queries.shape[2]
    value_dim = width - (query_dim - rope_dim)
    made = F.linear(seen[:, :rank], up.flatten(0, 1)).view(-1, heads, width)
    plain, values = made.split((width - value_dim, value_dim), dim=2)
    keys = torch.cat((plain, seen[:, None, rank:].expand(-1, heads, -1)), dim=2)
    # PyTorch's fused attention on a CPU requires keys and values of the same width.
    values = F.pad(values, (0, max(0, query_dim - value_dim)))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
    attended = attend(q, k, v, tile.mask, scores, None)
    return attended[0, ..., :value_dim].transpose(0, 1)
