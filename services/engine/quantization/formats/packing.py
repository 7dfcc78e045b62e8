"""Small integers packed into 32-bit words, as checkpoint formats store them. Called by the formats."""

import torch
from torch import Tensor

WORD_BITS = 32


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks words [..., n] int32 into values [..., n * 32 / bits] uint8; the first value has the lowest bits.

    Values of 3 bits continue from one word into the next, so three words have 32 of them.
    """
    if WORD_BITS % bits:
        return _unpack_across(words, bits)
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    values = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2).to(torch.uint8)


def _unpack_across(words: Tensor, bits: int) -> Tensor:
    """Unpacks values that do not fit into words; see `unpack`. `n` is a multiple of `bits`."""
    wide = words.to(torch.int64).unflatten(-1, (-1, bits)) & ((1 << WORD_BITS) - 1)
    first = torch.arange(0, WORD_BITS * bits, bits)
    word, shift = first // WORD_BITS, first % WORD_BITS
    # A value that ends in the last word needs no word after it, so the last word is taken again.
    low, high = wide[..., word], wide[..., (word + 1).clamp(max=bits - 1)] << WORD_BITS
    values = ((high | low) >> shift) & ((1 << bits) - 1)
    return values.flatten(-2).to(torch.uint8)


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs values [..., n] into words [..., ceil(n * bits / 32)] int32, the inverse of `unpack`; padded with zeros."""
    per_word = WORD_BITS // bits
    padded = torch.nn.functional.pad(values.to(torch.int64), (0, -values.shape[-1] % per_word))
    shifts = torch.arange(0, WORD_BITS, bits)
    words = (padded.unflatten(-1, (-1, per_word)) << shifts).sum(dim=-1)
    return torch.where(words >= 1 << (WORD_BITS - 1), words - (1 << WORD_BITS), words).to(torch.int32)


def expect(name: str, tensor: Tensor, *shape: int) -> None:
    """Raises ValueError if a tensor does not have the expected shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} instead of {shape}")
