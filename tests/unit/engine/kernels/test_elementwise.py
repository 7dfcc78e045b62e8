import pytest
import torch

from antiphon.services.engine.kernels.activation import gated_by
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.kernels.rotary import make_rotation, rotate

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rms_norm_is_its_formula(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 24).to(dtype), torch.randn(24).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(rms_norm(x, None, 1e-5).double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected * weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_gated_silu_is_its_formula(dtype: torch.dtype) -> None:
    gate_up = torch.randn(4, 14).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(
        gated_by("silu")(gate_up).double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 12])
def test_rotation_turns_each_pair_by_position_times_frequency(interleaved: bool, rotary_dim: int) -> None:
    positions, frequencies = torch.tensor([0, 1, 7, 300]), torch.rand(rotary_dim // 2)
    x = torch.randn(4, 2, 12)
    rotated = rotate(x, make_rotation(positions, frequencies, 1.5, torch.float32, interleaved))
    expected = x.clone()
    for i in range(rotary_dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary_dim // 2)
        turn = torch.polar(torch.tensor(1.5), positions * frequencies[i])[:, None] * torch.complex(x[..., a], x[..., b])
        expected[..., a], expected[..., b] = turn.real, turn.imag
    torch.testing.assert_close(rotated, expected, rtol=1e-5, atol=1e-5)
