"""Checkpoints in GPTQ's layout, as AutoGPTQ and GPTQModel write them.

    qweight  int32 [in * bits / 32, out]       values packed along the inputs
    qzeros   int32 [groups, out * bits / 32]   zero points packed along the outputs; the first version of the format
                                               stores each of them minus 1
    scales   [groups, out]
    g_idx    int32 [in]                        group of each input; may be missing if groups are in order

With 3 bits, 32 values are in three words, one after the other.

Called by `formats.prepared`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from antiphon.services.engine.quantization.formats.grouped import grouped_weight
from antiphon.services.engine.quantization.formats.packing import WORD_BITS, expect, unpack
from antiphon.services.engine.quantization.weight import QuantizedWeight

_BITS = (2, 3, 4, 8)
_SECOND_VERSION = "gptq_v2"


@dataclass(frozen=True, slots=True)
class Gptq:
    """A `PreparedMethod`. `group_size`: inputs of a group, -1 for all."""

    bits: int
    group_size: int
    zeros_are_less_one: bool

    @staticmethod
    def of_config(settings: Mapping[str, Any]) -> "Gptq":
        """Returns the method that a `quantization_config` describes. Raises ValueError for unsupported values."""
        bits, group_size = int(settings["bits"]), int(settings.get("group_size", -1))
        if bits not in _BITS:
            raise ValueError(f"bits {bits}; weights of {', '.join(map(str, _BITS))} bits are")
        return Gptq(bits, group_size, settings.get("checkpoint_format", "gptq") != _SECOND_VERSION)

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """See `PreparedMethod`."""
        if not has(f"{module}.qweight"):
            return {}
        optional = {"g_idx": f"{module}.g_idx"} if has(f"{module}.g_idx") else {}
        return {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")} | optional

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        """See `PreparedMethod`."""
        out, width = shape
        groups = 1 if self.group_size <= 0 else -(-width // self.group_size)
        expect("qweight", parts["qweight"], width * self.bits // WORD_BITS, out)
        expect("qzeros", parts["qzeros"], groups, out * self.bits // WORD_BITS)
        expect("scales", parts["scales"], groups, out)
        values = unpack(parts["qweight"].t().contiguous(), self.bits)
        zeros = unpack(parts["qzeros"], self.bits).t().float()
        if self.zeros_are_less_one:
            zeros = zeros + 1
        return grouped_weight(values, parts["scales"].t(), zeros, self.bits, parts.get("g_idx"), self.group_size)

    def ignores(self, name: str) -> bool:
        """See `PreparedMethod`: some versions write a bias of zeros for layers that have none; the reader checks."""
        return name.endswith(".bias")
