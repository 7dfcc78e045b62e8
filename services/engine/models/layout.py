"""Which tensors of a checkpoint make up which parameter of a decoder, and in which order they are stacked.

A parameter is one or several checkpoint tensors joined along their first dimension: query, key and value projections
are one matrix here, and so are gate and up. Called by the weight loader, which reads and joins; nothing here has data.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.engine.models.description import DecoderDescription


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint and the shape that it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the decoder and the tensors that are stacked to make it."""

    name: str
    sources: tuple[Source, ...]


IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""Buffers that old checkpoints carry and that follow from the config."""


def llama_layout(description: DecoderDescription) -> tuple[Parameter, ...]:
    """The layout of checkpoints with Llama's names; biases and norms as the description says."""
    d = description
    outer = [
        Parameter("embedding", (Source("model.embed_tokens.weight", (d.vocab_size, d.hidden_size)),)),
        Parameter("final_norm", (Source("model.norm.weight", (d.hidden_size,)),)),
    ]
    if not d.tied_embeddings:
        outer.append(Parameter("head.weight", (Source("lm_head.weight", (d.vocab_size, d.hidden_size)),)))
    return (*outer, *(parameter for layer in range(d.num_layers) for parameter in _layer(d, layer)))


def ignored_names(description: DecoderDescription) -> frozenset[str]:
    """Tensors that a checkpoint may have although the decoder does not need them."""
    return frozenset({"lm_head.weight"} if description.tied_embeddings else ())


def _layer(d: DecoderDescription, layer: int) -> Iterator[Parameter]:
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    hidden, inner = d.hidden_size, d.intermediate_size
    heads = {"q_proj": d.q_size, "k_proj": d.kv_size, "v_proj": d.kv_size}
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    yield Parameter(f"{ours}.input_norm", (Source(f"{theirs}.input_layernorm.weight", (hidden,)),))
    yield Parameter(f"{ours}.mlp_norm", (Source(f"{theirs}.post_attention_layernorm.weight", (hidden,)),))
    yield from _linear(f"{ours}.qkv", attention, heads, hidden, d.qkv_bias)
    yield from _linear(f"{ours}.o", attention, {"o_proj": hidden}, d.q_size, d.o_bias)
    yield from _linear(f"{ours}.gate_up", mlp, {"gate_proj": inner, "up_proj": inner}, hidden, d.mlp_bias)
    yield from _linear(f"{ours}.down", mlp, {"down_proj": hidden}, inner, d.mlp_bias)
    if d.qk_norm:
        for which in ("q_norm", "k_norm"):
            yield Parameter(f"{ours}.{which}", (Source(f"{attention}.{which}.weight", (d.head_dim,)),))


def _linear(name: str, prefix: str, rows: dict[str, int], columns: int, bias: bool) -> Iterator[Parameter]:
    weights = tuple(Source(f"{prefix}.{part}.weight", (count, columns)) for part, count in rows.items())
    yield Parameter(f"{name}.weight", weights)
    if bias:
        yield Parameter(f"{name}.bias", tuple(Source(f"{prefix}.{part}.bias", (n,)) for part, n in rows.items()))
