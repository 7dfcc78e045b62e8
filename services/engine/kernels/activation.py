"""The activation of an MLP, gated or alone.

    silu       x / (1 + exp(-x))
    gelu       x Φ(x), Φ the normal distribution function
    gelu_tanh  x Φ(x) with Φ(x) ≈ (1 + tanh(sqrt(2 / π) (x + 0.044715 x³))) / 2
    relu       max(x, 0)
    relu2      max(x, 0)²
    xielu      p x² + b x for x > 0, else n (exp(min(x, e)) - 1 - x) + b x (arXiv 2411.13010); p, n, b, e are numbers of
               the layer, see `xielu_numbers`

    gated: gate_up [n, 2m], gate in the first m columns, up in the last m → act(gate) · up [n, m] of the same type
    swigluoai  gated only, of gpt-oss: g / (1 + exp(-1.702 g)) · (u + 1), g = min(gate, 7), u = up within -7 and 7

Called by the MLPs, which choose their activation once, when they are built.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.kernels.swigluoai import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}
"""The functions of x alone."""


SWIGLUOAI = "swigluoai"


def gated_by(kind: str) -> Activation:
    """Returns the function of gate_up [n, 2m] of a gated MLP with the activation `kind`."""
    return _swigluoai if kind == SWIGLUOAI else partial(gated, ACTIVATIONS[kind])


def xielu_numbers(stored: Tensor) -> Tensor:
    """Returns p, n, b and e of xielu, [4] float32, of the checkpoint's numbers: those of p and n, b, e."""
    positive, negative, slope, limit = stored.to(torch.float32)
    return torch.stack((F.softplus(positive), slope + F.softplus(negative), slope, limit))


def xielu(numbers: Tensor, x: Tensor) -> Tensor:
    """Returns the function of x, computed in float32. `numbers` [4] are p, n, b and e of the formula."""
    p, n, b, e = numbers
    wide = x.to(torch.float32)
    below = n * (torch.minimum(wide, e).expm1() - wide)
    return (torch.where(wide > 0, p * wide * wide, below) + b * wide).to(x.dtype)


def _swigluoai(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=SWIGLUOAI_LIMIT)
    return gate * (gate * SWIGLUOAI_ALPHA).sigmoid() * (up.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT) + 1)


def gated(activation: Activation, gate_up: Tensor) -> Tensor:
    """Returns act(gate) · up, see the module."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)
