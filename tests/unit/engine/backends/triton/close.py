"""How close a kernel's result must be to the reference's, by type."""

import torch
from torch import Tensor

from tests.support.kernels_on_gpu import COMPILED

TOLERANCES = {
    # Sums of some hundred products in another order.
    torch.float32: 2e-5,
    # Eleven bits of mantissa, a few roundings.
    torch.float16: 2e-3,
    # Eight bits, a few roundings; the interpreter's last step cuts off instead of rounding.
    torch.bfloat16: 2e-2,
}


def assert_close(ours: Tensor, theirs: Tensor, factor: float = 1.0) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    tolerance = TOLERANCES[theirs.dtype] * factor
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """For rows at different places of a tile: under the interpreter NumPy multiplies, on some processors by place."""
    if COMPILED:
        assert torch.equal(ours, theirs)
    else:
        assert_close(ours, theirs)
