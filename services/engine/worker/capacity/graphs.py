"""How long the sequences of a captured graph of a GPU may be, and the memory that graphs take.

A graph's list of the splits of keys (`kernels/splits`) has a fixed size (`Reach`). Each split leaves sums in float32,
for which a graph keeps memory. Plain arithmetic, used by the planning of memory and by the GPU backend.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.services.engine.kernels.splits import split_tokens, splits_of
from antiphon.services.engine.models.description import DecoderDescription

_LONG_TOKENS = 2**20
"""Tokens for which a graph's list has room beyond what sequences of the usual length take."""
_DRIVER_BYTES = 256 * 2**20
"""Estimated memory of the driver for the launches of all graphs, and of the activations of the largest one."""


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
