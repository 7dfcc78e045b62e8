"""The C++ library's quantized matrices for tests: one matrix in a model of nothing else, and the kinds to try."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from antiphon.services.engine.backends.cpu.native import NativeModel, Spec, native_weight
from antiphon.services.engine.quantization.rounding import quantize_int4, quantize_int8, quantize_nf4
from antiphon.services.engine.quantization.weight import QuantizedWeight
from tests.native.libraries import VARIANTS as INSTRUCTION_SETS
from tests.native.libraries import library

VARIANTS = tuple(INSTRUCTION_SETS) or ("none",)
"""Instruction sets of this processor, the best first."""
KINDS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": lambda weight: quantize_int8(weight),
    "int8, groups of 32": lambda weight: quantize_int8(weight, group_size=32),
    "int8, groups of 128": lambda weight: quantize_int8(weight, group_size=128),
    "int8, groups of 32 with zero points": lambda weight: with_zeros(quantize_int8(weight, group_size=32)),
    "int8, one group with zero points": lambda weight: with_zeros(quantize_int8(weight, group_size=4096)),
    "int8, groups of 16": lambda weight: quantize_int8(weight, group_size=16),
    "int8, groups of 16 with zero points": lambda weight: with_zeros(quantize_int8(weight, group_size=16)),
    "int8_dynamic": lambda weight: quantize_int8(weight, "int8_dynamic"),
    "int4, groups of 32": lambda weight: quantize_int4(weight, 32),
    "int4, groups of 128": lambda weight: quantize_int4(weight, 128),
    "int4, groups of 64 with zero points": lambda weight: quantize_int4(weight, 64, zero_points=True),
    "nf4, groups of 64": lambda weight: quantize_nf4(weight, 64),
    "int4_dynamic, groups of 32": lambda weight: replace(quantize_int4(weight, 32), kind="int4_dynamic"),
    "int4_dynamic, groups of 128 with zero points": lambda weight: replace(
        quantize_int4(weight, 128, zero_points=True), kind="int4_dynamic"
    ),
    "int4_dynamic, nf4, groups of 64": lambda weight: quantize_nf4(weight, 64, "int4_dynamic"),
}
WEIGHT_ONLY = tuple(kind for kind in KINDS if "dynamic" not in kind)
PANEL = 32


def with_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with zero points from -5 to 5 that depend on the numbers of each group."""
    width = weight.shape[1]
    padded = torch.nn.functional.pad(weight.values.to(torch.int64), (0, -width % weight.group_size))
    sums = padded.unflatten(1, (-1, weight.group_size)).sum(dim=2)
    return replace(weight, zeros=(sums % 11 - 5).to(torch.float32))


class OneMatrix:
    """y = x Wᵀ in the library."""

    def __init__(self, variant: str, weight: QuantizedWeight, dtype: torch.dtype, threads: int = 2) -> None:
        spec = Spec(num_layers=1, threads=threads, num_kv_heads=1, head_dim=PANEL, block_size=PANEL)
        spec.wide = dtype == torch.float32
        self.model: NativeModel = library(variant).new(spec)
        self.model.set_quantized(0, "o", 0, native_weight(weight), weight.shape, 0)
        self._out, self._dtype = weight.shape[0], dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in]; y [rows, out] float32."""
        width = -(-x.shape[1] // PANEL) * PANEL
        rows = torch.full((len(x), width + PANEL), torch.nan, dtype=self._dtype)
        rows[:, :width] = 0
        rows[:, : x.shape[1]] = x
        y = torch.full((len(x), -(-self._out // PANEL) * PANEL), torch.nan)
        self.model.multiply(0, "o", 0, (rows.data_ptr(), rows.stride(0)), len(x), (y.data_ptr(), y.stride(0)))
        return y[:, : self._out].clone()


@contextmanager
def one_matrix(
    variant: str, weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16, threads: int = 2
) -> Iterator[OneMatrix]:
    """Freed at the end."""
    matrix = OneMatrix(variant, weight, dtype, threads)
    try:
        yield matrix
    finally:
        matrix.model.free()


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of very different sizes, one of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    x[rows // 2] = 0 if rows > 1 else x[0]
    return x.to(dtype)


def random_weight(out: int, width: int, seed: int = 0) -> Tensor:
    """A weight with outputs of different sizes, one of zeros, and an outlier."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=generator) * torch.logspace(-2, 1, out)[:, None]
    weight[out // 2] = 0
    weight[0, -1] = 30
    return weight.to(torch.bfloat16)
