"""The gate of a gated MLP: y = silu(gate) · up, with silu(x) = x / (1 + exp(-x)).

    gate_up [n, 2m]: gate in the first m columns, up in the last m; y [n, m] of the same type

Called by the decoder's gated MLPs.
"""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns y, see the module."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
