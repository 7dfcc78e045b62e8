"""Slopes of linear position biases (ALiBi, arXiv 2108.12409, section 3).

    heads a power of two     slope_h = 2^(-8 (h + 1) / heads)
    otherwise                the slopes of the power of two below, then every other slope of the power of two above

Called when a model is loaded. The biases are added to the attention scores; in the reference they are part of the
masks.
"""

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Returns the slopes [num_heads] float32, all positive: a key further back gets a more negative bias."""
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / below) for head in range(below)]
    slopes += [2 ** (-8 * (head + 1) / (2 * below)) for head in range(0, 2 * (num_heads - below), 2)]
    return torch.tensor(slopes, dtype=torch.float32)
