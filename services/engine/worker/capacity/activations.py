"""The memory that a token's activations take in a step. Plain arithmetic, used by estimates and for captured graphs."""

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, Recurrent


def token_bytes(d: DecoderDescription, size: int, *, in_cpp: bool = False) -> int:
    """Returns the bytes of activations for each token of a step. `size`: bytes of an activation.

    `in_cpp`: in the C++ library.
    """
    heads = 2 * d.q_size + 2 * d.kv_size
    if d.recurrent is not None:
        mixing = sum(d.recurrent.in_widths) + d.recurrent.channels + _within(d.recurrent)
        heads = heads + mixing if d.attends_beside else max(heads, mixing)
    if d.latent is not None:
        # Latent attention: the queries, the queries multiplied into the latent space, the attention outputs, and their
        # values.
        heads += d.num_heads * (d.latent.query_dim + d.latent.value_dim)
    inner = (2 if d.gated_mlp else 1) * d.intermediate_size
    streams = d.streams.count * d.hidden_size if d.streams else 0
    if d.experts is not None:
        e = d.experts
        width = e.latent_size or d.hidden_size
        chosen = e.num_per_token * (2 * width + 3 * e.intermediate_size) + 2 * (
            e.shared_intermediate_size + e.latent_size
        )
        inner = max(chosen, inner if len(e.layers) < d.num_layers else 0)
    if in_cpp:
        # Sums are kept in 32 bits beside the activations.
        return size * (8 * d.hidden_size + heads + inner) + (4 - size) * (2 * d.hidden_size + inner) + 4 * streams
    return size * (4 * d.hidden_size + heads + 3 * inner + 2 * streams)


def _within(shape: Recurrent) -> int:
    """Returns the numbers of a token that products within a mixer read and give."""
    if isinstance(shape, ChannelSpace):
        return 2 * shape.channels + shape.step_rank + sum(shape.select_widths)
    if isinstance(shape, ChannelDelta):
        return 2 * shape.rank + sum(shape.in_widths[1:])
    return 0
