"""Root-mean-square norm and layer norm of rows, optionally added to a residual.

    rms     y = x / sqrt(mean(x²) + eps) · w
    layer   y = (x - mean(x)) / sqrt(var(x) + eps) · w + b

    result: y, or residual + y (in decoders with a norm after attention and after the MLP)
    x, residual [n, width] float32 | bfloat16 | float16; w, b [width] of any float type; result like x

Everything is computed in float32 and rounded once. For norms with the factor 1 + weight, the caller passes that factor
in float32 (`models/layers/norm`). One program computes one row. References: `kernels/rms_norm`, PyTorch's
`layer_norm`, arXiv 1910.07467, arXiv 1607.06450.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.runtime import launch, power_of_two


@triton.jit
def _norm_kernel(
    x, residual, weight, bias, out, row_stride, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, LAYER: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    inside = i < WIDTH
    values = tl.load(x + row * row_stride + i, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        values = tl.where(inside, values - tl.sum(values, 0) / WIDTH, 0.0)
    y = values * (1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + eps)) * factor
    if LAYER:
        y += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        y += tl.load(residual + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, y.to(out.dtype.element_ty), mask=inside)


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """Returns the layer norm of x if a bias is given, else its RMS norm; plus the residual if one is given."""
    assert x.dim() == 2, "x must be rows"
    assert x.stride(1) == 1, "rows of x must be contiguous"
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    width = x.shape[1]
    padded = power_of_two(width)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(
        _norm_kernel, (x.shape[0],), x, residual, weight, bias, out, x.stride(0), eps,
        warps=min(16, max(1, padded // 512)), WIDTH=width, PADDED=padded, LAYER=bias is not None,
        ADDED=residual is not None,
    )  # fmt: skip
    return out
