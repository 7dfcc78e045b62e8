"""A mixture of experts as two grouped matrix products; formula and shapes as in `kernels/experts`.

    1  align    sorts the (token, expert) pairs by expert and pads each expert's pairs to whole tiles of rows
    2  inner    [pairs, m] = act(x gateᵀ) · (x upᵀ), or act(x upᵀ) without gates, rows of x gathered by pair
    3  outer    [pairs, hidden] = weight · inner downᵀ, both with biases if experts have some
    4  combine  y[token] = residual + Σ of its pairs, in the router's order

The host counts nothing: the sizes of all launches follow from the shapes, so a CUDA graph can capture them. There
are no atomic additions. The rows of a tile usually follow from the number of pairs of the step, and with them the
instructions that multiply, so a token's result may differ in the last bits with the number of tokens. Programs of
unused tiles exit immediately. Similar to the fused kernels of vLLM and SGLang, with a stable counting sort in place of
an atomic one.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.activation import activated
from antiphon.services.engine.backends.triton.kernels.grouped import PackedExperts, multiply_pairs
from antiphon.services.engine.backends.triton.kernels.runtime import ceil_div, launch, power_of_two

_SORTED_AT_ONCE = 1024
_FIXED_ROWS = 64


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(chosen, counts, num_pairs, AT_ONCE: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros((AT_ONCE,), tl.int32)
    for first in range(0, num_pairs, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        found += (tl.load(chosen + i, mask=i < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    chosen, counts, pairs, owners, num_pairs,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes one expert's pairs, in order, after the tiles of the experts before it, and the owner of each tile."""
    expert = tl.program_id(0)
    e = tl.arange(0, EXPERTS_PAD)
    tiles = tl.cdiv(tl.load(counts + e, mask=e < EXPERTS, other=0), TILE)
    before, mine = tl.sum(tl.where(e < expert, tiles, 0), 0), tl.sum(tl.where(e == expert, tiles, 0), 0)
    for tile in range(0, mine):
        tl.store(owners + before + tile, expert)
    place = before * TILE
    for first in range(0, num_pairs, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        ours = tl.load(chosen + i, mask=i < num_pairs, other=-1) == expert
        rank = tl.cumsum(ours.to(tl.int32), 0) - 1
        tl.store(pairs + place + rank, i, mask=ours)
        place += tl.sum(ours.to(tl.int32), 0)


@triton.jit
def _combine_kernel(parts, residual, out, width, PER_TOKEN: tl.constexpr, PIECE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    acc = tl.zeros((PIECE,), tl.float32)
    for k in tl.static_range(PER_TOKEN):
        acc += tl.load(parts + (token * PER_TOKEN + k) * width + i, mask=i < width, other=0.0).to(tl.float32)
    if residual is not None:
        acc += tl.load(residual + token * width + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(out + token * width + i, acc.to(out.dtype.element_ty), mask=i < width)


def mixed_experts(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor | PackedExperts,
    down: Tensor | PackedExperts,
    activation: str,
    residual: Tensor | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    weighted_inputs: bool = False,
    gated: bool = True,
    one_tile: bool = False,
) -> Tensor:
    """Returns y [n, hidden], see the module.

    `shares`, `chosen` [n, k]: the router's weights and experts; `biases`: of both matrices, [experts, out].
    `weighted_inputs`: the weights multiply the first product, before its biases, in place of the second one. `gated`:
    `gate_up` has gates; else it is [experts, m, hidden]. `one_tile`: tiles are the same for any number of pairs, so
    that a token has the same bits in any step.
    """
    tokens, per_token = chosen.shape
    experts, hidden, inner_width = down.shape
    num_pairs = tokens * per_token
    rows = _FIXED_ROWS if one_tile else _tile_rows(num_pairs, experts)
    pairs, owners = _align(chosen, experts, rows)
    inner = torch.empty((num_pairs, inner_width), dtype=x.dtype, device=x.device)
    outer = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    places = {"pairs": pairs, "owners": owners, "rows": rows, "activation": activation}
    multiply_pairs(
        x, gate_up, biases[0], shares, inner,
        per_row=per_token, outer=False, weighted=weighted_inputs, gated=gated, **places,
    )  # fmt: skip
    multiply_pairs(
        inner, down, biases[1], shares, outer,
        per_row=1, outer=True, weighted=not weighted_inputs, gated=False, **places,
    )  # fmt: skip
    return _combined(outer, residual, tokens)


def library_experts(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    residual: Tensor | None = None,
    *,
    weighted_inputs: bool = False,
    gated: bool = True,
) -> Tensor:
    """Returns the same by PyTorch's grouped product, for plain matrices without biases. See `mixed_experts`.

    Rows are copied in the order of their experts before the products, and back after them.
    """
    tokens, per_token = chosen.shape
    experts = len(down)
    # With tiles of one row the pairs are sorted without padding, and the owners are their experts.
    pairs, owners = _align(chosen, experts, 1)
    ends = torch.searchsorted(owners, torch.arange(experts, device=x.device), right=True, out_int32=True)
    weights = shares.flatten().index_select(0, pairs).unsqueeze(1)
    inner = F.grouped_mm(x.index_select(0, pairs // per_token), gate_up.transpose(1, 2), offs=ends)
    inner = activated(inner.mul_(weights) if weighted_inputs else inner, activation, gated)
    outer = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    outer = outer if weighted_inputs else outer.mul_(weights)
    return _combined(torch.empty_like(outer).index_copy_(0, pairs.to(torch.int64), outer), residual, tokens)


def _combined(parts: Tensor, residual: Tensor | None, tokens: int) -> Tensor:
    """Returns residual + Σ of the parts [pairs, hidden] of each token."""
    hidden = parts.shape[1]
    out = torch.empty((tokens, hidden), dtype=parts.dtype, device=parts.device)
    grid, per_token = (tokens, ceil_div(hidden, 1024)), len(parts) // max(1, tokens)
    launch(_combine_kernel, grid, parts, residual, out, hidden, warps=4, PER_TOKEN=per_token, PIECE=1024)
    return out


def _align(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns (`pairs`, `owners`).

    `pairs` [tiles · rows]: pair numbers sorted by expert; the number of pairs in padding rows. `owners` [tiles]: the
    expert of each tile; -1 for unused tiles.
    """
    num_pairs = chosen.numel()
    tiles = min(num_pairs, ceil_div(num_pairs, rows) + experts)
    chosen = chosen.to(torch.int32).contiguous()
    counts = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    pairs = torch.full((tiles * rows,), num_pairs, dtype=torch.int32, device=chosen.device)
    owners = torch.full((tiles,), -1, dtype=torch.int32, device=chosen.device)
    at_once = min(_SORTED_AT_ONCE, power_of_two(num_pairs, 16))
    launch(_count_kernel, (experts,), chosen, counts, num_pairs, warps=4, AT_ONCE=at_once)
    launch(
        _sort_kernel, (experts,), chosen, counts, pairs, owners, num_pairs,
        warps=4, EXPERTS=experts, EXPERTS_PAD=power_of_two(experts), TILE=rows, AT_ONCE=at_once,
    )  # fmt: skip
    return pairs, owners


def _tile_rows(num_pairs: int, experts: int) -> int:
    """Returns the rows of a tile, 16, 64 or 128, by the average number of pairs of an expert. Tensor cores need 16."""
    average = num_pairs // experts
    return 128 if average > 96 else 64 if average > 24 else 16
