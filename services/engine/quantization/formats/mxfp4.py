"""Experts in MXFP4 (OCP Microscaling Formats 1.0), as checkpoints of gpt-oss have them.

    NAME_blocks  uint8 [experts, out, groups, 16]: 32 numbers of 4 bits (e2m1) each, the first in the lower half
    NAME_scales  uint8 [experts, out, groups]: the power of two of a group, plus 127
    NAME         the dequantized matrix, transposed: [experts, in, out]

The experts stay in 4 bits: numbers and scales are exact in every compute data type. Called by `formats.prepared`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from antiphon.services.engine.quantization.formats.packing import expect
from antiphon.services.engine.quantization.method import PreparedMethod
from antiphon.services.engine.quantization.weight import QuantizedWeight

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers that the 16 values represent."""
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", 127
_GROUP = 32


class Mxfp4(PreparedMethod):
    """A `PreparedMethod`: only experts are quantized, in tensors with all experts of a layer."""

    @staticmethod
    def of_config(settings: Mapping[str, Any]) -> "Mxfp4":
        """Returns the method."""
        del settings
        return Mxfp4()

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """See `PreparedMethod`."""
        if not has(f"{module}{_BLOCKS}"):
            return {}
        return {"blocks": f"{module}{_BLOCKS}", "scales": f"{module}{_SCALES}"}

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """See `PreparedMethod`; the rows of all experts, one expert after the other."""
        blocks, powers = parts["blocks"], parts["scales"]
        groups = shape[1] // _GROUP
        if blocks.dtype != torch.uint8 or powers.dtype != torch.uint8 or shape[1] % _GROUP:
            raise ValueError(f"blocks are {blocks.dtype}, scales {powers.dtype}, for {shape[1]} inputs in groups of 32")
        values, powers = blocks.flatten(0, 1).flatten(1), powers.flatten(0, 1)
        expect("blocks", values, shape[0], shape[1] // 2)
        expect("scales", powers, shape[0], groups)
        exponents = powers.to(torch.int32) - _BIAS
        scales = torch.ldexp(torch.ones(exponents.shape), exponents)
        return QuantizedWeight(
            kind="int4", values=values, shape=shape, scales=scales, group_size=_GROUP, levels=torch.tensor(LEVELS)
        )
