"""Root-mean-square norm (arXiv 1910.07467): y = x / sqrt(mean(x²) + eps) · w, over the last dimension.

    x [..., n] float32 | bfloat16 | float16, w [n] of the same type or None for w = 1; y like x

The mean is computed in float32 for every type. Called by the decoder.
"""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns y, see the module."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
