"""Tensors without data, of the types that kernels are compiled for."""

import torch
from torch import Tensor

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Returns a tensor of the `meta` device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def words(*shape: int) -> Tensor:
    """Returns whole numbers."""
    return empty(*shape, dtype=torch.int32)
