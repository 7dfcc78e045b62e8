"""Values, scales and zero points of a matrix: rounding to the nearest value of a given range.

Scales are rounded to their stored type before weights are divided by them, so storing them causes no further error.
Called by the algorithms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

INT8_MAX, INT4_MAX, INT4_MIDDLE = 127, 15, 8


@dataclass(frozen=True, slots=True)
class Rounded:
    """A quantized matrix: (values - zeros) * scales.

    `values` [out, in]: int8 -127 … 127 without zero points, or uint8 0 … 15 with them; `scales` [out, groups] of the
    stored type; `zeros` [out, groups] uint8. `groups` [in]: the group of each input; by default they are in order.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None

    def group_of_input(self) -> Tensor:
        """Returns the group of each input [in] int64."""
        width = self.values.shape[1]
        return torch.arange(width) // (width // self.scales.shape[1]) if self.groups is None else self.groups

    def plain(self) -> Tensor:
        """Returns the weights [out, in] float32 that the matrix stands for."""
        groups, values = self.group_of_input(), self.values.float()
        if self.zeros is not None:
            values = values - self.zeros.float()[:, groups]
        return values * self.scales.float()[:, groups]


@dataclass(frozen=True, slots=True)
class Ranges:
    """The range of the 16 values for each output and group: `scales` float32 as stored, `zeros` float32 0 … 15."""

    scales: Tensor
    zeros: Tensor

    def values(self, weight: Tensor) -> Tensor:
        """Returns the nearest values float32 of `weight` [..., n], with ranges [..., 1]."""
        return ((weight / self.scales).round() + self.zeros).clamp(0, INT4_MAX)

    def nearest(self, weight: Tensor) -> Tensor:
        """Returns the weights of the nearest values."""
        return (self.values(weight) - self.zeros) * self.scales


def stored_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns scales as float32 numbers that `dtype` represents; scales that become 0 are replaced by 1."""
    rounded = scales.to(dtype).float()
    return torch.where(rounded > 0, rounded, 1.0)


def int8(weight: Tensor, dtype: torch.dtype) -> Rounded:
    """Rounds [out, in] float32 with one scale per output, whose largest weight becomes 127."""
    scales = stored_scales(weight.abs().amax(dim=1, keepdim=True) / INT8_MAX, dtype)
    values = (weight / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Rounded(values, scales.to(dtype))


def with_zeros(low: Tensor, high: Tensor, dtype: torch.dtype) -> Ranges:
    """Returns ranges of 16 values from `low` (at most 0) to `high` (at least 0)."""
    scales = stored_scales((high - low) / INT4_MAX, dtype)
    return Ranges(scales, (-low / scales).round().clamp(0, INT4_MAX))


def symmetric(largest: Tensor, dtype: torch.dtype) -> Ranges:
    """Returns ranges from -8 to 7 scales; `largest`, the largest weight of each range, equals 7.5 scales."""
    scales = stored_scales(largest * 2 / INT4_MAX, dtype)
    return Ranges(scales, torch.full_like(scales, INT4_MIDDLE))


def extremes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least and largest of [..., n] as [..., 1], extended to include 0."""
    return groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
