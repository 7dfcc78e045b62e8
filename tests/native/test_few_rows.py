"""Matrices whose terms do not all fit a cache: sums go on from piece to piece, and pass to pass, in any company."""

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.cpu.native import Spec
from tests.native.libraries import VARIANTS, library

pytestmark = pytest.mark.model

WIDTH = 7000
ROWS = (1, 2, 3, 4, 5, 6, 10, 31, 33, 97, 300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("out", [32, 70, 96, 130, 500])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_gets_the_same_sums_whatever_goes_past_a_panel_with_it(
    variant: str, out: int, dtype: torch.dtype
) -> None:
    wide = dtype == torch.float32
    model = library(variant).new(
        Spec(num_layers=1, threads=2, num_kv_heads=1, head_dim=32, block_size=32, wide=int(wide))
    )
    generator = torch.Generator().manual_seed(out)
    weight = torch.randn(out, WIDTH, generator=generator).to(dtype)
    rows = torch.zeros(max(ROWS), WIDTH + 64, dtype=dtype)
    rows[:, :WIDTH] = torch.randn(max(ROWS), WIDTH, generator=generator).to(dtype)
    model.set_matrix(0, "o", 0, weight.data_ptr(), (out, WIDTH), 0)
    results = []
    for count in ROWS:
        sums = torch.empty(count, out + 64)
        model.multiply(0, "o", 0, (rows.data_ptr(), rows.stride(0)), count, (sums.data_ptr(), sums.stride(0)))
        results.append(sums[:, :out].numpy())
    model.free()
    exact = (rows[:, :WIDTH].double() @ weight.double().T).numpy()
    np.testing.assert_allclose(results[-1], exact, rtol=0, atol=5e-3 * np.abs(exact).max())
    for result in results:
        np.testing.assert_array_equal(result, results[-1][: len(result)])
