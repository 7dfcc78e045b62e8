"""How long the sequences of a captured graph of a GPU may be, and the memory that graphs take.

Decode attention divides the keys of a sequence into splits, each a fixed range of positions:

    splits 0 … 63      `split_tokens` keys each, so that short sequences are divided among many programs
    splits 64 …        four times as many, so that long sequences have few sums to combine

A graph's list of splits has a fixed size (`Reach`). Each split leaves sums in float32, for which a graph keeps memory.
Plain arithmetic, used by the planning of memory and by the GPU backend.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from antiphon.services.engine.models.description import DecoderDescription

SPLIT_TOKENS: Final = 256
"""Keys of one of a sequence's first splits. Fixed, because a sequence's sums must not depend on the number of other
sequences."""
SHORT_SPLITS: Final = 64
LONG_SPLIT: Final = 4
"""How many times as many keys a split has behind the first `SHORT_SPLITS`."""
_SPLIT_HEADS = 32
"""Heads of latent attention for which a split has `SPLIT_TOKENS` keys; with more heads it has more keys."""
_LONG_TOKENS = 2**20
"""Tokens for which a graph's list has room beyond what sequences of the usual length take."""
_DRIVER_BYTES = 256 * 2**20
"""Estimated memory of the driver for the launches of all graphs, and of the activations of the largest one."""

Integers = NDArray[np.int64]


def split_tokens(group: int, *, latent: bool) -> int:
    """Returns the keys of one of a sequence's first splits. `group`: query heads of a key head.

    With latents, a partial result is as wide as a row for each head. The more heads a model has, the more keys a split
    has, so that all partial results together take no more memory.
    """
    return SPLIT_TOKENS * max(1, group // _SPLIT_HEADS) if latent else SPLIT_TOKENS


def splits_of(num_keys: Integers, split_tokens: int) -> Integers:
    """Returns the number of splits that so many keys from the first one are in. `split_tokens`: see `split_tokens`."""
    short = SHORT_SPLITS * split_tokens
    return -(-np.minimum(num_keys, short) // split_tokens) + -(
        -np.maximum(num_keys - short, 0) // (LONG_SPLIT * split_tokens)
    )


@dataclass(frozen=True, slots=True)
class Reach:
    """The sequences that fit a captured graph.

    Sequences of up to `usual` tokens always do. Longer ones, of up to `longest` tokens, do while few enough are in a
    step: the list of splits has room for a million keys of theirs.
    """

    usual: int
    longest: int

    def max_items(self, num_seqs: int, split_tokens: int) -> int:
        """Returns the number of splits that the list of a graph of `num_seqs` sequences has room for."""
        longest, usual = splits_of(np.array([self.longest, min(self.usual, self.longest)]), split_tokens).tolist()
        return num_seqs * usual + min(num_seqs * (longest - usual), _LONG_TOKENS // split_tokens)


def partial_bytes(d: DecoderDescription, num_seqs: int, reach: Reach) -> int:
    """Returns the bytes of the sums that a layer's splits leave: for each head, a row and two numbers in float32."""

    def of(layer: DecoderDescription) -> int:
        each = split_tokens(layer.num_heads // layer.num_kv_heads, latent=layer.latent is not None)
        width = layer.head_dim if layer.latent is None else layer.latent.rank
        return reach.max_items(num_seqs, each) * layer.num_heads * (width + 2) * 4

    return max(of(d.of_layer(layer)) for layer in range(d.num_layers))


def graphs_bytes(d: DecoderDescription, num_seqs: int, reach: Reach) -> int:
    """Returns the device memory, in bytes, that the captured graphs of up to `num_seqs` sequences keep.

    The logits of the largest graph count twice: in the graph's own memory and in the common buffer.
    """
    return _DRIVER_BYTES + partial_bytes(d, num_seqs, reach) + 2 * 4 * num_seqs * d.vocab_size
