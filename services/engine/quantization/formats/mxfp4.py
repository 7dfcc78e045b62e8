"""Experts in MXFP4 (OCP Microscaling Formats 1.0), as checkpoints of gpt-oss have them.

    NAME_blocks  uint8 [experts, out, groups, 16]: 32 numbers of 4 bits (e2m1) each, the first in the lower half
    NAME_scales  uint8 [experts, out, groups]: the power of two of a group, plus 127
    NAME         what they stand for, transposed: [experts, in, out]

Such models run through transformers, with plain weights. Called by `worker/transformers_model`; a family of the
registry has no such tensors.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from services.engine.quantization.weight import QuantizedWeight

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers that the 16 values stand for."""
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", 127


class Mxfp4:
    """A `PreparedMethod` without quantized linear layers: only experts are, in tensors of their own."""

    @staticmethod
    def of_config(settings: Mapping[str, Any]) -> "Mxfp4":
        """Returns the method."""
        del settings
        return Mxfp4()

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """See `PreparedMethod`."""
        return {}

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        """See `PreparedMethod`."""
        raise AssertionError("no linear layer has this form")

    def ignores(self, name: str) -> bool:
        """See `PreparedMethod`."""
        return False


def plain_experts(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weights [experts, in, out] that blocks and scales stand for. Raises ValueError for other shapes."""
    if blocks.dim() != 4 or blocks.shape[3] != 16 or blocks.shape[:3] != scales.shape:
        raise ValueError(f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} do not belong together")
    levels = torch.tensor(LEVELS)
    plain = torch.empty(blocks.shape[0], blocks.shape[2] * 32, blocks.shape[1], dtype=dtype)
    # An expert at a time: a model's experts have many gigabytes.
    for expert, (values, powers) in enumerate(zip(blocks, scales, strict=True)):
        pairs = torch.stack((values & 15, values >> 4), dim=-1).flatten(2)
        numbers = torch.ldexp(levels[pairs.to(torch.int64)], powers.to(torch.int32)[..., None] - _BIAS)
        plain[expert] = numbers.flatten(1).t()
    return plain


def plain_tensors(model_dir: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and value of each tensor of a checkpoint in safetensors files, experts as plain weights.

    Raises ValueError for blocks without scales.
    """
    places = dict[str, Path]()
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    for name, path in places.items():
        if name.endswith(_SCALES) and f"{name.removesuffix(_SCALES)}{_BLOCKS}" in places:
            continue
        if not name.endswith(_BLOCKS):
            yield name, _read(path, name)
            continue
        plain, scales = name.removesuffix(_BLOCKS), f"{name.removesuffix(_BLOCKS)}{_SCALES}"
        if scales not in places:
            raise ValueError(f"{name} has no {scales}")
        yield plain, plain_experts(_read(path, name), _read(places[scales], scales), dtype)


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
