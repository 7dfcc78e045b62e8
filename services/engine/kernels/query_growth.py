"""The factor on queries that grows with the position.

    factor(t) = 1 + rate · log(1 + floor(t / length))

Called by the attentions of the decoders, once a step.
"""

import torch
from torch import Tensor


def query_growth(positions: Tensor, rate: float, length: int) -> Tensor:
    """Returns the factors [num_tokens] float32 of positions t [num_tokens], which are integers."""
    return 1.0 + rate * torch.log1p((positions // length).to(torch.float32))
