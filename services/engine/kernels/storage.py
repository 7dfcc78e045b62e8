"""How numbers lie in the KV cache where its type is not the model's: stored = round(clamp(x)), read = widen(stored).

The scale is 1. An 8-bit float has few operations of its own: it is moved as bytes and widened when it is read. Called
by the attention kernel and whoever copies blocks.
"""

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in the cache's type; what is too large becomes the largest number."""
    if values.dtype == dtype:
        return values
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def as_moved(stored: Tensor) -> Tensor:
    """The same memory in a type that can be indexed on every device."""
    return stored.view(torch.uint8) if stored.dtype in FLOAT8 else stored
