"""Converts numbers for a KV cache whose type is not the model's: stored = round(clamp(x)), read = convert(stored).

There is no scaling factor. PyTorch has few operations on 8-bit floats, so they are copied as bytes and converted to the
model's type when they are read. Called by the attention kernel and by the code that copies blocks.
"""

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values in the cache's type; values out of its range are clamped to its largest number."""
    if values.dtype == dtype:
        return values
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def as_moved(stored: Tensor) -> Tensor:
    """Returns a view of the memory in a type that can be indexed on every device: 8-bit floats become bytes."""
    return stored.view(torch.uint8) if stored.dtype in FLOAT8 else stored
