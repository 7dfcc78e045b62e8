"""Weights in 8 or 4 bits as the C++ library takes them, and how plain weights become such: once, at load.

The library's `quantized.h` says what the kinds mean and what their products are exact to. This holds no file format; a
checkpoint that is quantized already fills in a `QuantizedWeight` with what it has. Called by `decoder.py`, whose caller
chooses what is quantized.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from services.engine.cpu.native import Quantized

WeightKind = Literal["int8", "int8_dynamic", "int4"]
"""8 bits a weight; the same with 8 bits for the rows too; 4 bits a weight in groups."""
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
"""Quantiles of the normal distribution: Dettmers et al., "QLoRA" (arXiv 2305.14314), appendix E."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [out, in]. Everything but `values` is float32."""

    kind: WeightKind
    values: Tensor
    """[out, in] int8 or uint8; [out, ceil(in / 2)] uint8 with two values in a byte, the first in the lower half."""
    shape: tuple[int, int]
    scales: Tensor
    """[out]; int4: [out, groups]."""
    group_size: int = 0
    """int4: inputs with one scale, a multiple of 32 or at least `in`."""
    zeros: Tensor | None = None
    """int4: [out, groups], among 0 … 15, or among the levels."""
    levels: Tensor | None = None
    """int4: sixteen numbers that values stand for, rounded to bfloat16. None: 0 … 15, and -8 … 7 without `zeros`."""
    has_sign: bool = False
    """int4: values are -8 … 7."""

    def __post_init__(self) -> None:
        """Raises ValueError where the parts do not fit together."""
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
        """Whether `values` has two in a byte."""
        return self.kind == "int4" and self.values.shape[1] != self.shape[1]

    def native(self) -> Quantized:
        """For the library; valid while this lives."""
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
        """The plain weights [out, in] float32 that this stands for."""
        if self.kind != "int4":
            return self.values.to(torch.float32) * self.scales[:, None]
        numbers = self._levels_of(self._places())
        groups = torch.arange(self.shape[1]) // self.group_size
        if self.zeros is not None:
            numbers = numbers - self.zeros[:, groups]
        return numbers * self.scales[:, groups]

    def _places(self) -> Tensor:
        """Which of the sixteen each value is: [out, in] int64."""
        values = self.values.to(torch.int64)
        if self.two_a_byte:
            values = torch.stack([values & _INT4_MAX, values >> 4], dim=-1).flatten(1)[:, : self.shape[1]]
        return (values & _INT4_MAX) ^ (_INT4_MIDDLE if self.has_sign else 0)

    def _levels_of(self, places: Tensor) -> Tensor:
        if self.levels is not None:
            return self.levels.to(torch.bfloat16).to(torch.float32)[places]
        return places.to(torch.float32) - (0 if self.zeros is not None else _INT4_MIDDLE)


Quantize = Callable[[str, Tensor], "Tensor | QuantizedWeight"]
"""Of a matrix' name as in the library and its weight, what is to be used instead; the weight itself leaves it alone."""


def quantize_int8(weight: Tensor, kind: Literal["int8", "int8_dynamic"] = "int8") -> QuantizedWeight:
    """One scale for each output: its largest weight is 127. The error of a weight is at most half its scale."""
    wide = weight.to(torch.float32)
    scales = _scale(wide.abs().amax(dim=1) / _INT8_MAX)
    values = (wide / scales[:, None]).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return QuantizedWeight(kind, values, _shape(weight), scales)


def quantize_int4(weight: Tensor, group_size: int = 128, zero_points: bool = False) -> QuantizedWeight:
    """One scale for each output and group of inputs; the error of a weight is at most half its scale.

    Symmetric: from -7 to 7 scales. With zero points the sixteen values span the group's weights, zero among them.
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
    """Each weight the nearest of 16 quantiles of a normal distribution times its group's largest weight."""
    groups = _grouped(weight, group_size)
    levels = torch.tensor(NF4_LEVELS).to(torch.bfloat16).to(torch.float32)
    scales = _scale(groups.abs().amax(dim=2))
    between = (levels[1:] + levels[:-1]) / 2
    values = torch.bucketize(groups / scales[:, :, None], between).to(torch.uint8)
    packed = pack_nibbles(values.flatten(1)[:, : weight.shape[1]])
    return QuantizedWeight("int4", packed, _shape(weight), scales, group_size, levels=levels)


def pack_nibbles(values: Tensor) -> Tensor:
    """Values 0 … 15 [out, in] uint8, two in a byte [out, ceil(in / 2)], the first in the lower half."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return (values[:, ::2] | (values[:, 1::2] << 4)).contiguous()


def _grouped(weight: Tensor, group_size: int) -> Tensor:
    """[out, groups, group_size] float32, the last group padded with zeros. Raises ValueError."""
    if group_size <= 0 or group_size % GROUP_MULTIPLE:
        raise ValueError(f"groups of {group_size} inputs: must be a multiple of {GROUP_MULTIPLE}")
    padding = -weight.shape[1] % group_size
    return torch.nn.functional.pad(weight.to(torch.float32), (0, padding)).unflatten(1, (-1, group_size))


def _scale(scales: Tensor) -> Tensor:
    """One where there is nothing to scale."""
    return torch.where(scales > 0, scales, 1.0)


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]
