"""The 8-bit numbers of the KV cache: every instruction set rounds and reads them as PyTorch does."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.cpu.compile import QUIET, SOURCE, run
from antiphon.services.engine.kernels.storage import as_stored
from tests.native.libraries import VARIANTS, need_compiler

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def given() -> torch.Tensor:
    """Every number of either type, all midpoints of neighbours and their neighbours; the range's ends; random ones."""
    exact = torch.cat([torch.arange(256, dtype=torch.uint8).view(kind).float() for kind in TYPES])
    exact = exact[exact.isfinite()].sort().values
    middle = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([torch.nextafter(middle, torch.tensor(end)) for end in (-torch.inf, torch.inf)])
    special = torch.tensor([0.0, -0.0, 1e-45, 1e-30, 449.0, 464.0, 57345.0, 61440.0, 3e38, torch.inf, torch.nan])
    draw = torch.Generator().manual_seed(1)
    random = torch.randn(4000, generator=draw) * torch.exp(torch.randn(4000, generator=draw) * 6)
    every = torch.cat([exact, middle, near, special, -special, random])
    return torch.nn.functional.pad(every, (0, -len(every) % 16))


@pytest.mark.spec("S-SRV-036")
@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_of_8_bits_are_those_of_torch(variant: str, tmp_path: Path) -> None:
    program = tmp_path / "float8"
    source = Path(__file__).with_name("float8.cpp")
    flags = ("-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", *QUIET, *VARIANTS[variant].flags)
    run([need_compiler(), *flags, "-I", str(SOURCE), str(source), "-o", str(program)])
    numbers = given()
    done = subprocess.run([str(program)], input=numbers.numpy().tobytes(), capture_output=True, timeout=60, check=True)
    answer, place = done.stdout, 0

    def take(count: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal place
        part = answer[place : place + count * dtype.itemsize]
        place += len(part)
        return torch.frombuffer(bytearray(part), dtype=dtype)

    for kind in TYPES:
        ours, theirs = take(len(numbers), torch.uint8), as_stored(numbers, kind)
        nan = theirs.float().isnan()
        np.testing.assert_array_equal(ours[~nan], theirs.view(torch.uint8)[~nan])
        assert ours.view(kind).float()[nan].isnan().all()
        for dtype in (torch.float32, torch.bfloat16):
            read = take(256, dtype).float()
            exact = torch.arange(256, dtype=torch.uint8).view(kind).float()
            # Infinity is never stored.
            np.testing.assert_array_equal(read, torch.where(exact.isinf(), torch.nan, exact))
    assert place == len(answer)
