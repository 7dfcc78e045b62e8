"""Quantizes plain weights to 8 or 4 bits by rounding to nearest, without activation data.

`online` chooses which of a model's matrices are rounded while they are loaded. Methods that use activations are part of
the quantization tool. Called by `online`, the tool and tests.
"""

from typing import Literal

import torch
from torch import Tensor

from antiphon.services.engine.quantization.weight import (
    GROUP_MULTIPLE,
    INT4_MAX,
    INT4_MIDDLE,
    INT8_GROUP_MULTIPLE,
    INT8_MAX,
    QuantizedWeight,
    pack_nibbles,
)

_FP8_MAX = 448.0
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


def quantize_int8(
    weight: Tensor, kind: Literal["int8", "int8_dynamic"] = "int8", group_size: int = 0
) -> QuantizedWeight:
    """Quantizes with one scale per output, whose largest weight becomes 127. A weight's error is at most half a scale.

    With a group size (kind int8 only), each group of this many inputs has its own scale.
    """
    groups = _grouped(weight, group_size, INT8_GROUP_MULTIPLE) if group_size else weight.to(torch.float32)[:, None]
    scales = _scale(groups.abs().amax(dim=2) / INT8_MAX)
    rounded = (groups / scales[:, :, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    values = rounded.flatten(1)[:, : weight.shape[1]].contiguous()
    return QuantizedWeight(
        kind=kind,
        values=values,
        shape=_shape(weight),
        scales=scales if group_size else scales[:, 0],
        group_size=group_size,
    )


def quantize_int4(weight: Tensor, group_size: int = 128, zero_points: bool = False) -> QuantizedWeight:
    """Quantizes with one scale per output and group of inputs. A weight's error is at most half its scale.

    Without zero points the range is symmetric: from -7 to 7 scales. With zero points the 16 values span the range of
    the group's weights, extended to include zero.
    """
    groups = _grouped(weight, group_size)
    if zero_points:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scales = _scale((high - low) / INT4_MAX)
        zeros = (-low / scales).round().clamp(0, INT4_MAX)
    else:
        scales, zeros = _scale(groups.abs().amax(dim=2) / (INT4_MIDDLE - 1)), None
    middle = INT4_MIDDLE if zeros is None else zeros[:, :, None]
    values = ((groups / scales[:, :, None]).round() + middle).clamp(0, INT4_MAX).to(torch.uint8)
    packed = pack_nibbles(values.flatten(1)[:, : weight.shape[1]])
    return QuantizedWeight(
        kind="int4", values=packed, shape=_shape(weight), scales=scales, group_size=group_size, zeros=zeros
    )


def quantize_nf4(
    weight: Tensor, group_size: int = 64, kind: Literal["int4", "int4_dynamic"] = "int4"
) -> QuantizedWeight:
    """Maps each weight to the nearest of 16 quantiles of a normal distribution, times its group's largest weight.

    With int4_dynamic the quantiles are rounded to multiples of 1/127.
    """
    groups = _grouped(weight, group_size)
    levels, largest = torch.tensor(NF4_LEVELS, device=weight.device).to(torch.bfloat16).to(torch.float32), 1
    if kind == "int4_dynamic":
        levels, largest = (levels * INT8_MAX).round(), INT8_MAX
    scales = _scale(groups.abs().amax(dim=2) / largest)
    between = (levels[1:] + levels[:-1]) / 2
    values = torch.bucketize(groups / scales[:, :, None], between).to(torch.uint8)
    packed = pack_nibbles(values.flatten(1)[:, : weight.shape[1]])
    return QuantizedWeight(
        kind=kind, values=packed, shape=_shape(weight), scales=scales, group_size=group_size, levels=levels
    )


def quantize_fp8(weight: Tensor) -> QuantizedWeight:
    """Quantizes to float8_e4m3 with one scale per output, whose largest weight becomes 448."""
    wide = weight.to(torch.float32)
    scales = _scale(wide.abs().amax(dim=1) / _FP8_MAX)
    values = (wide / scales[:, None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return QuantizedWeight(kind="fp8", values=values, shape=_shape(weight), scales=scales, rows_in_fp8=True)


def _grouped(weight: Tensor, group_size: int, multiple: int = GROUP_MULTIPLE) -> Tensor:
    """Returns [out, groups, group_size] float32, the last group padded with zeros. Raises ValueError for a bad size."""
    if group_size <= 0 or group_size % multiple:
        raise ValueError(f"groups of {group_size} inputs: must be a multiple of {multiple}")
    padding = -weight.shape[1] % group_size
    return torch.nn.functional.pad(weight.to(torch.float32), (0, padding)).unflatten(1, (-1, group_size))


def _scale(scales: Tensor) -> Tensor:
    """Replaces a scale of 0 by 1."""
    return torch.where(scales > 0, scales, 1.0)


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]
