"""The activation of an MLP, gated or alone; formulas as in `kernels/activation`.

    gated   x [n, 2m], gate in the first m columns, up in the last m → act(gate) · up [n, m]
    alone   x [n, m] → act(x) [n, m]

Everything is computed in float32 and rounded once. One program computes a piece of a row. `numbers` [4] float32 are
those of xielu, which is for x alone.

Reference: `kernels/activation`. Gated units: arXiv 2002.05202.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.runtime import LOG2E, ceil_div, launch

_PIECE = 1024


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Returns act(x) for x float32."""
    if KIND == "silu":
        return x / (1.0 + tl.exp2(-x * LOG2E))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 = 1 / (1 + e^(-2z))
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp2(-2.0 * LOG2E * z))
    elif KIND == "relu2":
        y = tl.maximum(x, 0.0)
        return y * y
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def xielu(x, numbers):
    """Returns the function for x float32; `numbers` are p, n, b and e of the formula."""
    p, n, b, e = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    m = tl.minimum(x, e)
    # exp(m) - 1 - m, which is small beside its terms near 0, where its series is exact.
    series = m * m * (1 / 2 + m * (1 / 6 + m * (1 / 24 + m * (1 / 120 + m * (1 / 720)))))
    rest = tl.where(m > -0.25, series, tl.exp2(m * LOG2E) - 1.0 - m)
    return tl.where(x > 0.0, p * x * x, n * (rest + m - x)) + b * x


@triton.jit
def activate_gated(gate, up, KIND: tl.constexpr):
    """Returns act(gate) · up for both float32."""
    if KIND == "swigluoai":
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp2(gate * (-1.702 * LOG2E))) * (up + 1.0)
    else:
        return activate(gate, KIND) * up


@triton.jit
def softplus(x):
    """Returns log(1 + e^x) for x float32."""
    e = tl.exp2(tl.minimum(x, 20.0) * LOG2E)
    # Where e is small beside 1, its series is exact, and steps of state spaces are small.
    series = e * (1.0 - e * (1 / 2 - e * (1 / 3 - e * (1 / 4 - e * (1 / 5)))))
    return tl.where(x > 20.0, x, tl.where(e < 1 / 16, series, tl.log(1.0 + e)))


@triton.jit
def _activation_kernel(x, out, numbers, width, KIND: tl.constexpr, GATED: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = i < width
    if GATED:
        gate = tl.load(x + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
        y = activate_gated(gate, up, KIND)
    elif KIND == "xielu":
        y = xielu(tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32), numbers)
    else:
        y = activate(tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(out + row * width + i, y.to(out.dtype.element_ty), mask=inside)


def activated(x: Tensor, kind: str, gated: bool, numbers: Tensor | None = None) -> Tensor:
    """Returns act(x), or act(gate) · up if gated, see the module. `kind`: the activation's name in a description."""
    assert x.is_contiguous(), "x must be contiguous"
    rows, width = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    grid = (rows, ceil_div(width, _PIECE))
    launch(_activation_kernel, grid, x, out, numbers, width, warps=4, KIND=kind, GATED=gated, PIECE=_PIECE)
    return out
