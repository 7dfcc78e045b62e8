"""Checkpoints of bitsandbytes, as transformers saves them: NF4 and FP4 in blocks, and the 8 bits of LLM.int8.

4 bits (Dettmers et al., arXiv 2305.14314). A block has consecutive values of the weight, usually 64:

    weight                               uint8 [out * in / 2, 1]   two values per byte, the first in the upper half
    weight.absmax                        [blocks]                  the weight is the number of a value times this
    weight.quant_map                     float32 [16]              the numbers that values stand for
    weight.quant_state.bitsandbytes__…   uint8                     JSON: quant_type, blocksize, shape, nested_…

With double quantization `absmax` is uint8, and stands for nested_quant_map[absmax] * nested_absmax + nested_offset:

    weight.nested_quant_map  float32 [256]
    weight.nested_absmax     float32 [blocks / nested_blocksize]

8 bits (arXiv 2208.07339):

    weight  int8 [out, in]
    SCB     float32 [out]   the largest absolute weight of an output, which is stored as 127

Activations are not rounded to 8 bits: results are at least as exact as with LLM.int8. Called by `formats.prepared`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from antiphon.services.engine.quantization.formats.packing import expect
from antiphon.services.engine.quantization.rounding import GROUP_MULTIPLE
from antiphon.services.engine.quantization.weight import INT4_MAX, QuantizedWeight

_LEVELS, _NESTED_LEVELS = 16, 256
_INT8_MAX = 127
_STATE = "quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_OPTIONAL = ("nested_absmax", "nested_quant_map")


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """A `PreparedMethod`. The number of bits follows from the tensors."""

    @staticmethod
    def of_config(settings: Mapping[str, Any]) -> "BitsAndBytes":
        """Returns the method that a `quantization_config` describes. Raises ValueError for unsupported values."""
        storage = str(settings.get("bnb_4bit_quant_storage") or "uint8")
        if storage != "uint8":
            raise ValueError(f"bnb_4bit_quant_storage {storage}; uint8 is")
        return BitsAndBytes()

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """See `PreparedMethod`."""
        weight = f"{module}.weight"
        if has(f"{module}.SCB"):
            return {"weight": weight, "scb": f"{module}.SCB"}
        if not has(f"{weight}.absmax"):
            return {}
        kind = next((kind for kind in _KINDS if has(f"{weight}.{_STATE}{kind}")), _KINDS[0])
        parts = {"weight": weight, "absmax": f"{weight}.absmax", "quant_map": f"{weight}.quant_map"}
        parts |= {name: f"{weight}.{name}" for name in _OPTIONAL if has(f"{weight}.{name}")}
        return parts | {"state": f"{weight}.{_STATE}{kind}"}

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        """See `PreparedMethod`. If blocks cross rows, the weight is dequantized."""
        if "scb" in parts:
            return _int8(parts["weight"], parts["scb"], shape)
        return _four_bits(parts, shape)

    def ignores(self, name: str) -> bool:
        """See `PreparedMethod`: ignores the marker of the byte order on a GPU; in files the order is always by rows."""
        return name.endswith(".weight_format")


def _int8(values: Tensor, largest: Tensor, shape: tuple[int, int]) -> QuantizedWeight:
    expect("weight", values, *shape)
    expect("SCB", largest, shape[0])
    if values.dtype != torch.int8:
        raise ValueError(f"weight is {values.dtype} instead of int8")
    return QuantizedWeight(kind="int8", values=values, shape=shape, scales=largest.to(torch.float32) / _INT8_MAX)


def _four_bits(parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
    out, width = shape
    state = _state(parts["state"])
    if list(state.get("shape") or ()) != [out, width]:
        raise ValueError(f"quant_state has shape {state.get('shape')} instead of {shape}")
    size = _positive(state, "blocksize")
    blocks = -(-out * width // size)
    if parts["weight"].dtype != torch.uint8 or parts["weight"].numel() != -(-out * width // 2):
        raise ValueError(f"weight is {parts['weight'].dtype} with {parts['weight'].numel()} bytes")
    expect("quant_map", parts["quant_map"], _LEVELS)
    expect("absmax", parts["absmax"], blocks)
    levels, scales = parts["quant_map"].to(torch.float32), _scales(parts, state, blocks)
    packed = parts["weight"].flatten()
    if width % size == 0 and size % GROUP_MULTIPLE == 0:
        # In `QuantizedWeight` the first value of a byte is in the lower half.
        swapped = ((packed >> 4) | (packed << 4)).view(out, width // 2)
        return QuantizedWeight(
            kind="int4", values=swapped, shape=shape, scales=scales.view(out, -1), group_size=size, levels=levels
        )
    places = torch.stack([packed >> 4, packed & INT4_MAX], dim=-1).flatten()[: out * width].to(torch.int64)
    return (levels[places] * scales.repeat_interleave(size)[: out * width]).view(shape)


def _scales(parts: Mapping[str, Tensor], state: Mapping[str, Any], blocks: int) -> Tensor:
    """Returns the scale of each block [blocks] float32, with double quantization undone."""
    absmax = parts["absmax"]
    if absmax.dtype != torch.uint8:
        return absmax.to(torch.float32).contiguous()
    if not all(name in parts for name in _OPTIONAL):
        raise ValueError("absmax is quantized, but nested_absmax or nested_quant_map is missing")
    size = _positive(state, "nested_blocksize")
    expect("nested_quant_map", parts["nested_quant_map"], _NESTED_LEVELS)
    expect("nested_absmax", parts["nested_absmax"], -(-blocks // size))
    offset = state.get("nested_offset")
    if not isinstance(offset, int | float):
        raise ValueError(f"nested_offset of quant_state is {offset!r}")
    numbers = parts["nested_quant_map"].to(torch.float32)[absmax.to(torch.int64)]
    return numbers * parts["nested_absmax"].to(torch.float32).repeat_interleave(size)[:blocks] + offset


def _state(blob: Tensor) -> Mapping[str, Any]:
    try:
        state = json.loads(bytes(blob.to(torch.uint8).flatten().tolist()))
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"quant_state is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise ValueError("quant_state is not a JSON object")
    return cast(dict[str, Any], state)


def _positive(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} of quant_state is {value!r}")
    return value
