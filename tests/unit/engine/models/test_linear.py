import pytest
import torch

from antiphon.services.engine.models.layers.linear import DenseLinear, PackedLinear, can_pack, make_linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_and_dense_weights_give_the_product(dtype: torch.dtype, rows: int, biased: bool) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip("this machine does not pack weights of this type")
    weight, x, residual = (torch.randn(size).to(dtype) for size in ((41, 24), (rows, 24), (rows, 41)))
    bias = torch.randn(41).to(dtype) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    for linear in (DenseLinear(weight, bias), PackedLinear(weight, bias)):
        torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance)
        added = linear.add_to(residual, x).double()
        torch.testing.assert_close(added, expected + residual.double(), rtol=tolerance, atol=tolerance)


def test_adding_leaves_the_residual_as_it_was() -> None:
    residual = torch.randn(2, 8)
    kept = residual.clone()
    make_linear(torch.randn(8, 8)).add_to(residual, torch.randn(2, 8))
    assert torch.equal(residual, kept)


def test_types_that_do_not_pack_stay_dense() -> None:
    assert isinstance(make_linear(torch.randn(4, 4, dtype=torch.float64)), DenseLinear)
