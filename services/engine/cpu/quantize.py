"""Weights of 8 or 4 bits in the form that the C++ library takes, and the quantization of plain weights at load time.

The library's `quantized.h` documents the kinds and the error bounds of their products. No file format is handled here:
a loader of checkpoints that are already quantized fills in a `QuantizedWeight`. Called by `decoder.py`, whose caller
chooses which weights are quantized.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from services.engine.cpu.native import Quantized

WeightKind = Literal["int8", "int8_dynamic", "int4"]
"""int8: 8 bits per weight; int8_dynamic: activations are rounded to 8 bits too; int4: 4 bits per weight, in groups."""
GROUP_MULTIPLE = 32
_INT8_MAX = 127
_INT4_MAX = 15
_INT4_MIDDLE = 8
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Levels of NF4, quantiles of the normal distribution: Dettmers et al., "QLoRA" (arXiv 2305.14314), appendix E."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A quantized matrix [out, in]. All tensors but `values` are float32."""

    kind: WeightKind
    values: Tensor
    """int8 or uint8 [out, in]; int4 also uint8 [out, ceil(in / 2)] with two per byte, the first in the lower half."""
    shape: tuple[int, int]
    scales: Tensor
    """[out]; for int4 [out, groups]."""
    group_size: int = 0
    """int4: number of inputs that share a scale, a multiple of 32 or at least `in`."""
    zeros: Tensor | None = None
    """int4: zero points [out, groups], on the scale 0 … 15, or on the scale of `levels` if they are given."""
    levels: Tensor | None = None
    """int4: the 16 numbers that values stand for, rounded to bfloat16. None: 0 … 15 with `zeros`, -8 … 7 without."""
    has_sign: bool = False
    """int4: whether values are -8 … 7 instead of 0 … 15."""

    def __post_init__(self) -> None:
        """Raises ValueError if shapes or types of the parts do not match."""
        out, width = self.shape
        two = self.two_a_byte
        columns = (width + 1) // 2 if two else width
        groups = (out, -(-width // self.group_size)) if self.kind == "int4" and self.group_size > 0 else (out,)
        if self.values.shape != (out, columns) or self.values.dtype not in (torch.int8, torch.uint8):
            raise ValueError(f"values are {self.values.dtype} {tuple(self.values.shape)}")
        for name, part, shape in (
            ("scales", self.scales, groups),
            ("zeros", self.zeros, groups),
            ("levels", self.levels, (_INT4_MAX + 1,)),
        ):
            if part is not None and (part.shape != shape or part.dtype != torch.float32):
                raise ValueError(f"{name} are {part.dtype} {tuple(part.shape)}, not float32 {shape}")

    @property
    def two_a_byte(self) -> bool:
        """Whether `values` has two values per byte."""
        return self.kind == "int4" and self.values.shape[1] != self.shape[1]

    def native(self) -> Quantized:
        """Returns the weight as the library takes it; valid while this object lives."""
        address = {
            "weight": self.values,
            "scales": self.scales,
            "zeros": self.zeros,
            "levels": self.levels,
        }
        assert all(part is None or part.is_contiguous() for part in address.values())
        return Quantized(
            kind=get_args(WeightKind).index(self.kind),
            group=self.group_size,
            two_a_byte=self.two_a_byte,
            has_sign=self.has_sign,
            **{name: 0 if part is None else part.data_ptr() for name, part in address.items()},
        )

    def dequantized(self) -> Tensor:
        """Returns the plain weights [out, in] float32 that this matrix stands for."""
        if self.kind != "int4":
            return self.values.to(torch.float32) * self.scales[:, None]
        numbers = self._levels_of(self._places())
        groups = torch.arange(self.shape[1]) // self.group_size
        if self.zeros is not None:
            numbers = numbers - self.zeros[:, groups]
        return numbers * self.scales[:, groups]

    def _places(self) -> Tensor:
        """Returns the index among the 16 levels of each value: [out, in] int64."""
        values = self.values.to(torch.int64)
        if self.two_a_byte:
            values = torch.stack([values & _INT4_MAX, values >> 4], dim=-1).flatten(1)[:, : self.shape[1]]
        return (values & _INT4_MAX) ^ (_INT4_MIDDLE if self.has_sign else 0)

    def _levels_of(self, places: Tensor) -> Tensor:
        if self.levels is not None:
            return self.levels.to(torch.bfloat16).to(torch.float32)[places]
        return places.to(torch.float32) - (0 if self.zeros is not None else _INT4_MIDDLE)


Quantize = Callable[[str, Tensor], "Tensor | QuantizedWeight"]
"""Takes a matrix's name in the library and its weight; returns the quantized weight, or the given one unchanged."""


def quantize_int8(weight: Tensor, kind: Literal["int8", "int8_dynamic"] = "int8") -> QuantizedWeight:
    """Quantizes with one scale per output, its largest weight being 127. A weight's error is at most half a scale."""
    wide = weight.to(torch.float32)
    scales = _scale(wide.abs().amax(dim=1) / _INT8_MAX)
    values = (wide / scales[:, None]).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return QuantizedWeight(kind, values, _shape(weight), scales)


def quantize_int4(weight: Tensor, group_size: int = 128, zero_points: bool = False) -> QuantizedWeight:
    """Quantizes with one scale per output and group of inputs. A weight's error is at most half its scale.

    Without zero points the range is symmetric: from -7 to 7 scales. With zero points the 16 values span the range of
    the group's weights, extended to include zero.
    """
    groups = _grouped(weight, group_size)
    if zero_points:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = _scale((high - low) / _INT4_MAX)
        zeros = (-low / scales).round().clamp(0, _INT4_MAX)
    else:
        scales, zeros = _scale(groups.abs().amax(dim=2) / (_INT4_MIDDLE - 1)), None
    middle = _INT4_MIDDLE if zeros is None else zeros[:, :, None]
    values = ((groups / scales[:, :, None]).round() + middle).clamp(0, _INT4_MAX).to(torch.uint8)
    packed = pack_nibbles(values.flatten(1)[:, : weight.shape[1]])
    return QuantizedWeight("int4", packed, _shape(weight), scales, group_size, zeros)


def quantize_nf4(weight: Tensor, group_size: int = 64) -> QuantizedWeight:
    """Maps each weight to the nearest of 16 quantiles of a normal distribution, times its group's largest weight."""
    groups = _grouped(weight, group_size)
    levels = torch.tensor(NF4_LEVELS).to(torch.bfloat16).to(torch.float32)
    scales = _scale(groups.abs().amax(dim=2))
    between = (levels[1:] + levels[:-1]) / 2
    values = torch.bucketize(groups / scales[:, :, None], between).to(torch.uint8)
    packed = pack_nibbles(values.flatten(1)[:, : weight.shape[1]])
    return QuantizedWeight("int4", packed, _shape(weight), scales, group_size, levels=levels)


def pack_nibbles(values: Tensor) -> Tensor:
    """Packs values 0 … 15 [out, in] uint8 into [out, ceil(in / 2)], two per byte, the first in the lower half."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return (values[:, ::2] | (values[:, 1::2] << 4)).contiguous()


def _grouped(weight: Tensor, group_size: int) -> Tensor:
    """Returns [out, groups, group_size] float32, the last group padded with zeros. Raises ValueError for a bad size."""
    if group_size <= 0 or group_size % GROUP_MULTIPLE:
        raise ValueError(f"groups of {group_size} inputs: must be a multiple of {GROUP_MULTIPLE}")
    padding = -weight.shape[1] % group_size
    return torch.nn.functional.pad(weight.to(torch.float32), (0, padding)).unflatten(1, (-1, group_size))


def _scale(scales: Tensor) -> Tensor:
    """Replaces a scale of 0 by 1."""
    return torch.where(scales > 0, scales, 1.0)


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]
