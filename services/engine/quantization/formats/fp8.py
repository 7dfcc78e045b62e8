"""Checkpoints of float8_e4m3 weights: one scale for a tensor, an output, or a block of outputs and inputs.

    weight            float8_e4m3fn [out, in]
    weight_scale      [] or [1], [out] or [out, 1]: the weight is the value times this scale
    weight_scale_inv  [out / block, in / block]: the same for blocks, under the name that DeepSeek gave it

Scales of activations are not used. If the config says that activations are in 8 bits, a backend may round them where
that is faster, with a scale for each row; results without rounding are at least as exact.

Called by `formats.prepared`; `compressed_tensors` has the same tensors under its own config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.quantization.formats.packing import expect
from antiphon.services.engine.quantization.weight import GROUP_MULTIPLE, QuantizedWeight

_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Fp8:
    """A `PreparedMethod`. `block`: numbers of outputs and inputs that share a scale; None: all inputs share it.

    `rows_in_fp8`: whether activations are in 8 bits too.
    """

    block: tuple[int, int] | None
    rows_in_fp8: bool = False

    @staticmethod
    def of_config(settings: Mapping[str, Any]) -> "Fp8":
        """Returns the method that a `quantization_config` describes."""
        block = settings.get("weight_block_size")
        return Fp8(None if block is None else (int(block[0]), int(block[1])), bool(settings.get("activation_scheme")))

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """See `PreparedMethod`."""
        scale = next((name for name in _SCALES if has(f"{module}.{name}")), None)
        return {} if scale is None else {"weight": f"{module}.weight", "scale": f"{module}.{scale}"}

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        """See `PreparedMethod`."""
        return fp8_weight(parts["weight"], parts["scale"], shape, self.block, self.rows_in_fp8)

    def ignores(self, name: str) -> bool:
        """See `PreparedMethod`: ignores scales of activations, which are not used."""
        return name.endswith(("input_scale", "activation_scale"))


def fp8_weight(
    values: Tensor,
    scales: Tensor,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    rows_in_fp8: bool = False,
) -> "Tensor | QuantizedWeight":
    """Returns the weight of `shape` [out, in] with these values and scales.

    Block scales are repeated for each output. The weight is dequantized if the block's inputs are not a multiple of 32.
    """
    expect("weight", values, *shape)
    if values.dtype != torch.float8_e4m3fn:
        raise ValueError(f"weight is {values.dtype} instead of float8_e4m3fn")
    scales = scales.to(torch.float32)
    if block is not None:
        rows, columns = (torch.arange(size) // length for size, length in zip(shape, block, strict=True))
        expect("scales", scales, int(rows[-1]) + 1, int(columns[-1]) + 1)
        if block[1] % GROUP_MULTIPLE == 0:
            return QuantizedWeight(
                kind="fp8", values=values, shape=shape, scales=scales[rows].contiguous(), group_size=block[1]
            )
        return values.to(torch.float32) * scales[rows][:, columns]
    if scales.numel() not in (1, shape[0]):
        raise ValueError(f"there are {scales.numel()} scales for {shape[0]} outputs")
    return QuantizedWeight(
        kind="fp8",
        values=values,
        shape=shape,
        scales=scales.flatten().expand(shape[0]).contiguous(),
        rows_in_fp8=rows_in_fp8,
    )
