"""Checkpoints in AWQ's layout for matrix products ("gemm"), as AutoAWQ writes them.

    qweight  int32 [in, out / 8]       values of eight outputs in a word, in the order of `_ORDER`
    qzeros   int32 [groups, out / 8]   zero points, in the same order
    scales   [groups, out]

Called by `formats.prepared`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.quantization.formats.grouped import grouped_weight
from antiphon.services.engine.quantization.formats.packing import expect, unpack
from antiphon.services.engine.quantization.method import PreparedMethod
from antiphon.services.engine.quantization.weight import QuantizedWeight

BITS = 4
PER_WORD = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each place of a word, lowest bits first, the index of the output whose value it has."""


@dataclass(frozen=True, slots=True)
class Awq(PreparedMethod):
    """A `PreparedMethod`. `group_size`: inputs of a group, -1 for all."""

    group_size: int

    @staticmethod
    def of_config(settings: Mapping[str, Any]) -> "Awq":
        """Returns the method that a `quantization_config` describes. Raises ValueError for unsupported values."""
        bits = int(settings.get("bits", settings.get("w_bit", BITS)))
        version = str(settings.get("version", "gemm")).lower()
        if bits != BITS:
            raise ValueError(f"bits {bits}; weights of {BITS} bits are")
        if version != "gemm":
            raise ValueError(f"version {version}; gemm is")
        return Awq(int(settings.get("group_size", settings.get("q_group_size", 128))))

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """See `PreparedMethod`."""
        names = ("qweight", "qzeros", "scales") if has(f"{module}.qweight") else ()
        return {part: f"{module}.{part}" for part in names}

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        """See `PreparedMethod`."""
        out, width = shape
        groups = 1 if self.group_size <= 0 else -(-width // self.group_size)
        expect("qweight", parts["qweight"], width, out // PER_WORD)
        expect("qzeros", parts["qzeros"], groups, out // PER_WORD)
        expect("scales", parts["scales"], groups, out)
        values, zeros = (_outputs(parts[name]).t().contiguous() for name in ("qweight", "qzeros"))
        return grouped_weight(values, parts["scales"].t(), zeros, BITS, group_size=self.group_size)


def _outputs(words: Tensor) -> Tensor:
    """Unpacks words [n, out / 8] into values [n, out] uint8 in the order of the outputs."""
    values = unpack(words, BITS).unflatten(-1, (-1, PER_WORD))
    return values[..., torch.tensor(ORDER).argsort()].flatten(-2)
