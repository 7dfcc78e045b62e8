"""Rotary position embedding (arXiv 2104.09864): pairs of a head's dimensions rotate by position times frequency.

    (a, b) → (a cos φ - b sin φ,  b cos φ + a sin φ),   φ = position · frequency_i

    x [num_tokens, heads, head_dim]; the first rotary_dim dimensions rotate, the rest are unchanged
    half split:   pair i is dimensions (i, i + rotary_dim / 2)
    interleaved:  pair i is dimensions (2i, 2i + 1)

Cosines and sines are computed in float32, then cast to the type of x. Called by the decoder: each rotation is made once
a step and used by every layer for queries and keys together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines in the order of the dimensions that rotate, [num_tokens, 1, rotary_dim] each.

    The sine of a pair's first member is negated, so that rotating is x · cos + partner(x) · sin.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


def make_rotation(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype, interleaved: bool
) -> Rotation:
    """Returns the rotation of positions [num_tokens] int64 with frequencies [rotary_dim / 2] float32.

    Positions [num_tokens, rotary_dim / 2] have one for each frequency. Cosines and sines are multiplied by `scale`.
    """
    angles = (positions if positions.dim() > 1 else positions.unsqueeze(1)).to(torch.float32) * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    join = _interleave if interleaved else _concatenate
    return Rotation(join(cos, cos).to(dtype).unsqueeze(1), join(-sin, sin).to(dtype).unsqueeze(1), interleaved)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Returns x [num_tokens, heads, head_dim] rotated, as a new tensor of the same type."""
    rotary_dim = rotation.cos.shape[-1]
    turning, staying = x[..., :rotary_dim], x[..., rotary_dim:]
    turned = torch.addcmul(turning * rotation.cos, _partners(turning, rotation.interleaved), rotation.sin)
    return turned if not staying.shape[-1] else torch.cat((turned, staying), dim=-1)


def _partners(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x.roll(x.shape[-1] // 2, dims=-1)


def _concatenate(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), dim=-1)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), dim=-1).flatten(-2)
