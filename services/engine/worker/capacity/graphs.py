"""Which steps a GPU runs as captured graphs, and the memory that graphs take.

    decode   every sequence computes one token: graphs for numbers of sequences, from token ids to logits
    mixed    any other step of few tokens: graphs for numbers of tokens, from token ids to hidden states

A graph's list of the splits of keys (`kernels/splits`) has a fixed size (`Reach`). Each split leaves sums in float32,
for which a graph keeps memory. Plain arithmetic, used by the planning of memory and by the GPU backend.
"""

from dataclasses import dataclass

import numpy as np

from antiphon.services.engine.kernels.splits import split_tokens, splits_of
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.capacity.activations import token_bytes
from antiphon.services.engine.worker.capacity.profile import StepBounds
from antiphon.shared.config import EngineSettings

_LONG_TOKENS = 2**20
"""Tokens for which a graph's list has room beyond what sequences of the usual length take."""
_LAUNCH_BYTES = 4 * 2**20
"""Estimated memory of the driver for the launches of a graph."""
_MIXED_TOKENS_MAX = 1024
"""With more tokens, a step takes longer on the device than its launches on the host."""
_LATENT_TOKENS_MAX = 256
"""With latents, longer prompts are faster without a graph, because graphs do not expand latents."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBounds:
    """The largest captured steps: sequences, and tokens of a mixed step. `num_slots`: adapter slots, 0 for none.

    `max_queries`: tokens of a decoding sequence, with its draft tokens.
    """

    num_seqs: int
    num_tokens: int
    max_queries: int
    reach: Reach
    num_slots: int = 0

    @property
    def decode(self) -> list[int]:
        """Sequences of the decode graphs: 1, 2, 4, then multiples of 8 up to 256 and of 16 beyond, and the most."""
        sizes = {1, 2, 4, *range(8, 257, 8), *range(272, self.num_seqs + 1, 16), self.num_seqs}
        return sorted(size for size in sizes if size <= self.num_seqs)

    @property
    def mixed(self) -> list[int]:
        """Tokens of the mixed graphs. Padding takes at most as long as a third of the step, from 32 tokens on."""
        sizes = {16, 32, 48, *range(64, 128, 32), *range(128, 512, 64), *range(512, 1025, 128), self.num_tokens}
        return sorted(size for size in sizes if size <= self.num_tokens)


def graph_bounds(settings: EngineSettings, d: DecoderDescription, bounds: StepBounds) -> GraphBounds:
    """Returns what the graphs of an engine have room for, whose largest step is `bounds`."""
    adapters = settings.adapters
    return GraphBounds(
        num_seqs=bounds.num_rows,
        num_tokens=min(bounds.num_tokens, _MIXED_TOKENS_MAX if d.latent is None else _LATENT_TOKENS_MAX),
        max_queries=1 + bounds.num_drafts,
        reach=Reach(settings.execution.max_seq_len_to_capture, bounds.context),
        num_slots=(adapters.max_loras or 0) if adapters.enable_lora else 0,
    )


def partial_bytes(d: DecoderDescription, bounds: GraphBounds) -> int:
    """Returns the bytes of the sums that a layer's splits leave: for each head, a row and two numbers in float32."""

    def of(layer: DecoderDescription) -> int:
        each = split_tokens(layer.num_heads // layer.num_kv_heads, latent=layer.latent is not None)
        width = layer.head_dim if layer.latent is None else layer.latent.rank
        return bounds.reach.max_items(bounds.num_seqs, each) * layer.num_heads * (width + 2) * 4

    # The kernel has variants for numbers of queries that are powers of two.
    most_queries = 1 << (bounds.max_queries - 1).bit_length()
    return max(of(d.of_layer(layer)) for layer in range(d.num_layers)) * most_queries


def graphs_bytes(d: DecoderDescription, bounds: GraphBounds, itemsize: int) -> int:
    """Returns the device memory, in bytes, that all captured graphs keep. `itemsize`: bytes of an activation.

    They share the memory of the largest one. Beside it, logits and hidden states have buffers of their own, twice if
    there are graphs with adapters too.
    """
    sets = 2 if bounds.num_slots else 1
    launches = _LAUNCH_BYTES * sets * (len(bounds.decode) + len(bounds.mixed))
    activations = max(bounds.num_tokens, bounds.num_seqs) * token_bytes(d, itemsize)
    logits, hidden = 4 * bounds.num_seqs * d.vocab_size, itemsize * bounds.num_tokens * d.hidden_size
    return launches + activations + partial_bytes(d, bounds) + logits + sets * (logits + hidden)
