"""The nonlinearity of an MLP, alone or times a gate's partner.

    silu       x / (1 + exp(-x))
    gelu       x Φ(x), Φ the normal distribution's
    gelu_tanh  the same with Φ(x) ≈ (1 + tanh(sqrt(2 / π) (x + 0.044715 x³))) / 2
    relu       max(x, 0)

    gated: gate_up [n, 2m], gate in the first m columns, up in the last m → act(gate) · up [n, m] of the same type

`silu_mul` is the gated silu. Called by the MLPs, which choose theirs once.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gated(activation: Activation, gate_up: Tensor) -> Tensor:
    """See the module."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)
