"""Inverse frequencies of rotary position embeddings, for every kind of position scaling.

    default   f_i = theta^(-2i / rotary_dim)                            i in [0, rotary_dim / 2)
    linear    f_i / factor
    llama3    f_i / factor for long waves, f_i for short ones, a ramp between them (Llama 3.1)
    yarn      f_i / factor and f_i mixed by a ramp over i (arXiv 2309.00071)
    longrope  f_i / divisor_i (arXiv 2402.13753)
    proportional  f_i / factor for the first i, 0 for the others

Computed in float32, with the same order of operations as in transformers, so that even far positions agree to the last
bit. Called by the decoders when a model is loaded.
"""

import math

import torch
from torch import Tensor

from antiphon.services.engine.models.description import RopeParameters


def inverse_frequencies(rope: RopeParameters) -> Tensor:
    """Returns the inverse frequencies [rotary_dim / 2] float32, in radians per position."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rope.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, rope.theta**exponents)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.divisors, dtype=torch.float32) * rope.theta**exponents)
    if rope.kind == "proportional":
        return torch.where(torch.arange(len(frequencies)) < rope.num_turned, frequencies / rope.factor, 0.0)
    return frequencies


def axes_of(rope: RopeParameters) -> Tensor:
    """Returns for each frequency which of a token's three positions it uses, [rotary_dim / 2] int64."""
    sections = rope.sections or (rope.rotary_dim // 2,)
    if rope.interleaved_sections:
        turns = torch.arange(rope.rotary_dim // 2)
        axes = turns % len(sections)
        # The sections take turns; a frequency at the turn of a section that has ended uses the position in time.
        return torch.where(turns < torch.tensor(sections)[axes] * len(sections), axes, 0)
    return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))


def _llama3(rope: RopeParameters, frequencies: Tensor) -> Tensor:
    length = rope.original_max_positions
    waves = 2 * math.pi / frequencies
    long, short = waves > length / rope.low_freq_factor, waves < length / rope.high_freq_factor
    scaled = torch.where(long, frequencies / rope.factor, frequencies)
    share = (length / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - share) * scaled / rope.factor + share * scaled
    return torch.where(~long & ~short, mixed, scaled)


def _yarn(rope: RopeParameters, periods: Tensor) -> Tensor:
    low, high = (_dimension_of(rope, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _dimension_of(rope: RopeParameters, rotations: float) -> float:
    """Returns the dimension (not rounded) whose angle makes `rotations` full turns over the original context."""
    turns = rope.original_max_positions / (rotations * 2 * math.pi)
    return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))
