"""Checkpoints of the compressed-tensors package, which llm-compressor writes and vLLM reads.

    int-quantized    weight int8 [out, in], weight_scale [out, 1] or [1], weight_zero_point if ranges are not symmetric
    pack-quantized   weight_packed int32 [out, ceil(in * bits / 32)], weight_scale [out, groups], weight_shape [2],
                     weight_zero_point packed along the outputs if ranges are not symmetric, weight_g_idx [in] if groups
                     are not in order; half of the range is added to the stored values and zero points
    float-quantized  weight float8_e4m3fn [out, in], weight_scale

The format of a module follows from its tensors; the config has the number of bits and whether activations are in 8 bits
too. Each row of activations gets its own scale in each product, even if the checkpoint has a fixed one. Called by
`formats.prepared`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.quantization.formats.fp8 import fp8_weight
from antiphon.services.engine.quantization.formats.grouped import grouped_weight
from antiphon.services.engine.quantization.formats.packing import expect, unpack
from antiphon.services.engine.quantization.weight import QuantizedWeight

_BITS = (4, 8)
_BYTE_BITS = 8
_OPTIONAL = ("weight_zero_point", "weight_g_idx", "weight_shape")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensors:
    """A `PreparedMethod`."""

    bits: int
    rows_in_8_bits: bool
    group_size: int = 0
    """Number of inputs that share a scale; 0: all inputs."""
    block: tuple[int, int] | None = None
    """For 8-bit floating-point weights: numbers of outputs and inputs that share a scale."""
    rows_in_fp8: bool = False
    """For these: whether activations are in 8 bits too."""

    @staticmethod
    def of_config(settings: Mapping[str, Any]) -> "CompressedTensors":
        """Returns the method that a `quantization_config` describes. Raises ValueError for unsupported values."""
        groups = list(settings["config_groups"].values())
        if not groups and settings.get("kv_cache_scheme"):
            return CompressedTensors(
                bits=_BYTE_BITS, rows_in_8_bits=False
            )  # Plain weights, and scales of the KV cache.
        found = [CompressedTensors._of_group(group) for group in groups]
        if not found or any(method != found[0] for method in found):
            raise ValueError("config_groups must have one group, or groups with the same scheme")
        return found[0]

    @staticmethod
    def _of_group(group: Mapping[str, Any]) -> "CompressedTensors":
        weights, rows = group["weights"], group.get("input_activations") or {}
        bits = int(weights["num_bits"])
        if bits not in _BITS:
            raise ValueError(f"num_bits {bits}; weights of 4 and 8 bits are")
        if weights.get("type", "int") == "float":
            if bits != _BYTE_BITS:
                raise ValueError(f"floating-point weights of {bits} bits; of 8 bits they are")
            block = weights.get("block_structure") if weights.get("strategy") == "block" else None
            sizes = None if block is None else (int(block[0]), int(block[1]))
            in_8_bits = rows.get("type") == "float" and rows.get("num_bits") == _BYTE_BITS
            return CompressedTensors(bits=bits, rows_in_8_bits=False, block=sizes, rows_in_fp8=in_8_bits)
        whole = bool(rows) and rows.get("type", "int") == "int" and rows.get("num_bits") == _BYTE_BITS
        if rows and not whole:
            raise ValueError("input_activations that are not whole numbers of 8 bits")
        return CompressedTensors(
            bits=bits, rows_in_8_bits=whole, group_size=max(0, int(weights.get("group_size") or 0))
        )

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """See `PreparedMethod`."""
        if not has(f"{module}.weight_scale"):
            return {}
        stored = "weight_packed" if has(f"{module}.weight_packed") else "weight"
        optional = tuple(name for name in _OPTIONAL if has(f"{module}.{name}"))
        return {part: f"{module}.{part}" for part in (stored, "weight_scale", *optional)}

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        """See `PreparedMethod`."""
        if "weight_shape" in parts and tuple(parts["weight_shape"].tolist()) != shape:
            raise ValueError(f"weight_shape is {parts['weight_shape'].tolist()} instead of {list(shape)}")
        if "weight_packed" in parts:
            return self._packed(parts, shape)
        if parts["weight"].dtype == torch.int8:
            return self._bytes(parts, shape)
        return fp8_weight(parts["weight"], parts["weight_scale"], shape, self.block, self.rows_in_fp8)

    def ignores(self, name: str) -> bool:
        """See `PreparedMethod`: fixed scales of activations are ignored."""
        return name.endswith(("input_scale", "input_zero_point", "output_scale"))

    def _bytes(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        out, _ = shape
        expect("weight", parts["weight"], *shape)
        scales, zeros = parts["weight_scale"].float().reshape(-1), parts.get("weight_zero_point")
        if scales.numel() == 1:
            scales = scales.expand(out)
        symmetric = zeros is None or not bool(zeros.any())
        if symmetric and scales.numel() == out:
            kind = "int8_dynamic" if self.rows_in_8_bits else "int8"
            return QuantizedWeight(kind=kind, values=parts["weight"], shape=shape, scales=scales.contiguous())
        groups = parts["weight_scale"].float().reshape(out, -1)
        # Values and zero points are -128 … 127 here.
        offset = 1 << (_BYTE_BITS - 1)
        values = (parts["weight"].to(torch.int16) + offset).to(torch.uint8)
        points = None if zeros is None else zeros.float().reshape(out, -1) + offset
        return grouped_weight(values, groups, points, _BYTE_BITS, None, self._size(groups))

    def _packed(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        out, width = shape
        words = -(-width * self.bits // 32)
        expect("weight_packed", parts["weight_packed"], out, words)
        values = unpack(parts["weight_packed"], self.bits)[:, :width].contiguous()
        scales = parts["weight_scale"].float()
        scales = scales.reshape(1, 1).expand(out, 1) if scales.numel() == 1 else scales.reshape(out, -1)
        if self.bits == _BYTE_BITS and scales.shape[1] == 1 and "weight_zero_point" not in parts:
            # The values are stored plus 128.
            signed = (values.to(torch.int16) - (1 << (_BYTE_BITS - 1))).to(torch.int8)
            kind = "int8_dynamic" if self.rows_in_8_bits else "int8"
            return QuantizedWeight(kind=kind, values=signed, shape=shape, scales=scales[:, 0].contiguous())
        index = parts.get("weight_g_idx")
        if index is not None and bool((index < 0).any()):
            index = None  # The package fills the tensor with -1 if groups are in order.
        return grouped_weight(values, scales, self._zeros(parts, out), self.bits, index, self._size(scales))

    def _size(self, scales: Tensor) -> int:
        return self.group_size if scales.shape[1] > 1 else 0

    def _zeros(self, parts: Mapping[str, Tensor], out: int) -> Tensor | None:
        zeros = parts.get("weight_zero_point")
        if zeros is None:
            return None
        if zeros.dtype == torch.int32 and zeros.shape[0] != out:
            return unpack(zeros.t().contiguous(), self.bits).t()[:out].float()
        return zeros.float().reshape(out, -1) + (1 << (self.bits - 1))


def smoothquant() -> CompressedTensors:
    """Returns the method of the file `SMOOTHQUANT_FILE`: int-quantized, with activations in 8 bits."""
    return CompressedTensors(bits=_BYTE_BITS, rows_in_8_bits=True)
