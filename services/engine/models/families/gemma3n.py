"""Gemma 3n (text): layers that compute with one of several residual streams (`Streams`), and inputs of their own.

As in Gemma 4, queries, keys and values are normalised per head, scores have no other factor, the last layers read the
keys and values of earlier ones, and each layer has embeddings of its own for each token. Most gates of the first
layers' MLPs become zero.
"""

from statistics import NormalDist
from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    activation,
    boolean,
    config_error,
    integer,
    integer_or_zero,
    kv_sources,
    layer_windows,
    llama_like,
    number,
    optional_number,
    refuse_unless,
    ropes_by_kind,
)
from antiphon.services.engine.models.description import DecoderDescription, LayerInputs, Streams
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("Gemma3nForCausalLM",)
LIMITS = "no LoRA, no `antiphon quantize`, no stages of layers"
ABOUT = About(models="Gemma 3n (text checkpoints)", limits=LIMITS)

_PATTERN, _SPARSE_LAYERS, _SPARSITY = 5, 10, 0.95
_KV = ("k_proj", "v_proj", "k_norm", "v_norm")
"""What published checkpoints have even in layers that read the keys and values of others."""
DEFAULTS: Config = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "tie_word_embeddings": True,
}
"""Those of transformers, for fields that a config omits."""
layout = named_layout(
    Names(
        after_attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        after_mlp_norm="post_feedforward_layernorm",
        layer_inputs=(
            "model.embed_tokens_per_layer",
            "model.per_layer_model_projection",
            "model.per_layer_projection_norm",
        ),
        input_gate=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
        stream_ends=("model.altup_projections.{}", "model.altup_unembed_projections.{}"),
        stream_mix=(
            "altup.modality_router",
            "altup.router_norm",
            "altup.prediction_coefs",
            "altup.correction_coefs",
            "altup.correct_output_scale",
        ),
        side=("laurel.linear_left", "laurel.linear_right", "laurel.post_laurel_norm"),
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description."""
    fields: dict[str, Any] = {**DEFAULTS, **config}
    refuse_unless(fields, "altup_correct_scale", True)
    if fields.get("altup_active_idx") or boolean(fields, "use_bidirectional_attention", False):
        raise config_error("'altup_active_idx' must be 0, and 'use_bidirectional_attention' false.")
    layers = range(integer(fields, "num_hidden_layers"))
    usual = ["sliding_attention" if (layer + 1) % _PATTERN else "full_attention" for layer in layers]
    windows = layer_windows(
        {**fields, "layer_types": fields.get("layer_types") or usual}, integer(fields, "sliding_window")
    )
    sources, first_shared = kv_sources(windows, integer_or_zero(fields, "num_kv_shared_layers", 0))
    unused = (f"model.layers.{layer}.self_attn.{part}." for layer in layers[first_shared:] for part in _KV)
    head_dim, inner = integer(fields, "head_dim"), _inner(fields, len(layers))
    details: dict[str, Any] = {
        "residual": "normed",
        "activation": activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        "embedding_scale": integer(fields, "hidden_size") ** 0.5,
        "qkv_bias": boolean(fields, "attention_bias", False),
        "o_bias": boolean(fields, "attention_bias", False),
        "qk_norm": True,
        "value_norm": True,
        "query_scale": 1.0,
        "logits_softcap": optional_number(fields, "final_logit_softcapping"),
        "sliding_windows": windows,
        **ropes_by_kind(fields, head_dim, _usual_ropes(fields)),
        "layer_kv_heads": ((integer(fields, "num_key_value_heads"), head_dim),) * len(layers),
        "kv_sources": sources,
        "layer_inner": inner,
        "gate_cuts": _gate_cuts(fields, len(layers)),
        "layer_inputs": LayerInputs(
            size=integer(fields, "hidden_size_per_layer_input"),
            vocab_size=integer(fields, "vocab_size_per_layer_input"),
        ),
        "streams": Streams(count=integer(fields, "altup_num_inputs"), side_rank=integer(fields, "laurel_rank")),
        "other_parts": tuple(unused),
    }
    return llama_like(
        {**fields, "intermediate_size": max(inner), "rope_parameters": None, "rope_scaling": None},
        "gemma3n",
        **details,
    )


def _usual_ropes(config: Config) -> dict[str, Config]:
    """Returns the rotary parameters for each kind of layer, which older configs have in other fields."""
    return {
        "full_attention": {"rope_theta": number(config, "rope_theta", 1e6), **(config.get("rope_scaling") or {})},
        "sliding_attention": {"rope_theta": number(config, "rope_local_base_freq", 10_000.0)},
    }


def _inner(config: Config, num_layers: int) -> tuple[int, ...]:
    """Returns each layer's intermediate size. The field has one number, or one for each layer."""
    listed = _listed(config, "intermediate_size", num_layers)
    return tuple(integer({"intermediate_size": size}, "intermediate_size") for size in listed)


def _gate_cuts(config: Config, num_layers: int) -> tuple[float | None, ...]:
    """Returns where gates are cut so that a share of them becomes zero if they are distributed normally."""
    name, sparse = "activation_sparsity_pattern", _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
    usual = [_SPARSITY] * sparse + [0.0] * (num_layers - sparse)
    listed = usual if config.get(name) is None else _listed(config, name, num_layers)
    shares = [number({name: share}, name, 0.0) for share in listed]
    if not all(0.0 <= share < 1.0 for share in shares):
        raise config_error(f"'{name}' must have numbers from 0 to below 1.")
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)


def _listed(config: Config, name: str, num_layers: int) -> list[Any]:
    value = config.get(name)
    listed: list[Any] = value if isinstance(value, list) else [value] * num_layers
    if len(listed) != num_layers:
        raise config_error(f"'{name}' must have one number for each of {num_layers} layers.")
    return listed
