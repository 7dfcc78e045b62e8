"""Gemma 4 (text): layers with a sliding window and layers that see all tokens have heads of different widths.

Queries, keys and values are normalised per head, and scores have no other factor. Large models compute the values of
layers that see all tokens by the projection of the keys (`attention_k_eq_v`). In small ones the last layers read the
keys and values of earlier layers (`num_kv_shared_layers`), and each layer has embeddings of its own for each token
(`hidden_size_per_layer_input`). Where there are experts, they are beside the ordinary MLP.
"""

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
    optional_number,
    ropes_by_kind,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts, LayerInputs
from antiphon.services.engine.models.kv_groups import slabs_of
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM")
LIMITS = "no LoRA; E2B and E4B: no stages of layers"
ABOUT = About(models="Gemma 4 (text checkpoints)", tools=("gemma4",), reasoning=("gemma4",), limits=LIMITS)

_PATTERN, _WIDE_HEAD, _INPUTS = 6, 512, 256
_KV = ("k_proj", "v_proj", "k_norm")
"""What published checkpoints have even in layers that read the keys and values of others."""
_UNIFIED = "Gemma4UnifiedForCausalLM"
_ROPES: dict[str, Config] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
DEFAULTS: Config = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
"""Those of transformers, for fields that a config omits."""
layout = named_layout(
    Names(
        after_attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        after_mlp_norm="post_feedforward_layernorm",
        layer_scale="layer_scalar",
        layer_inputs=(
            "model.embed_tokens_per_layer",
            "model.per_layer_model_projection",
            "model.per_layer_projection_norm",
        ),
        input_gate=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
        router="router.proj",
        router_scale="router.scale",
        expert_scale="router.per_expert_scale",
        beside_norms=(
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
        ),
        stacked_up="experts.gate_up_proj",
        stacked_down="experts.down_proj",
        stacked_rows=True,
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Checkpoints of the unified architecture have neither experts nor layers' inputs."""
    unified = _UNIFIED in config["architectures"]
    usual = {"max_position_embeddings": 262_144, "sliding_window": 1024} if unified else {}
    fields: dict[str, Any] = {**DEFAULTS, **usual, **config}
    if fields.get("use_bidirectional_attention") == "all":
        raise config_error("'use_bidirectional_attention': attention to later tokens is not supported.")
    windows = _windows(fields)
    heads = tuple(_kv_heads(fields, layer, window is None) for layer, window in enumerate(windows))
    # The heads' widths differ, so the rotation of each kind of layer is that of its own width.
    wide = ropes_by_kind(fields, heads[-1][1], _ROPES)
    narrow = ropes_by_kind(fields, integer(fields, "head_dim"), _ROPES)
    sources, first_shared = kv_sources(windows, integer_or_zero(fields, "num_kv_shared_layers", 0))
    unused = (f"model.layers.{layer}.self_attn.{part}." for layer in range(first_shared, len(windows)) for part in _KV)
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
        "rope": wide["rope"],
        "local_rope": narrow["local_rope"],
        "max_positions": wide["max_positions"],
        "num_kv_heads": max(count for count, _ in heads),
        "head_dim": max(width for _, width in heads),
        "layer_kv_heads": heads,
        "layer_scales": True,
        "other_parts": tuple(unused),
        "experts": _experts(fields, len(windows)),
        "kv_sources": sources,
        **_widths(fields, first_shared, len(windows)),
    }
    if len({count * width for count, width in heads}) > 1:
        details["kv_slabs"] = slabs_of(heads, range(first_shared))
    if boolean(fields, "attention_k_eq_v", False):
        details["keys_as_values"] = frozenset(layer for layer, window in enumerate(windows) if window is None)
    if size := integer_or_zero(fields, "hidden_size_per_layer_input", 0 if unified else _INPUTS):
        rows = integer(fields, "vocab_size_per_layer_input", integer(fields, "vocab_size"))
        details["layer_inputs"] = LayerInputs(size=size, vocab_size=rows)
    return llama_like({**fields, "rope_parameters": None}, "gemma4", **details)


def has_mutual_images(config: Config) -> bool:
    """Whether the tokens of an image attend to each other in both directions, as in the larger models."""
    return config.get("use_bidirectional_attention") == "vision"


def _windows(config: Config) -> tuple[int | None, ...]:
    """Returns each layer's window. The last layer sees all tokens in any case."""
    layers = range(integer(config, "num_hidden_layers"))
    usual = ["sliding_attention" if (layer + 1) % _PATTERN else "full_attention" for layer in layers]
    windows = layer_windows(
        {**config, "layer_types": config.get("layer_types") or usual}, integer(config, "sliding_window")
    )
    return (*windows[:-1], None)


def _kv_heads(config: Config, layer: int, sees_all: bool) -> tuple[int, int]:
    """Returns the number of key heads of a layer and the width of a head.

    Newer configs list the layers that differ in `per_layer_config`; published ones have fields with `global`.
    """
    listed = config.get("per_layer_config")
    if listed is not None:
        own: Config = {**config, **(listed.get(str(layer)) or {})}
    elif sees_all:
        usual = integer(config, "num_key_value_heads")
        differs = boolean(config, "attention_k_eq_v", False)
        count = integer(config, "num_global_key_value_heads", usual) if differs else usual
        own = {"num_key_value_heads": count, "head_dim": integer(config, "global_head_dim", _WIDE_HEAD)}
    else:
        own = config
    return integer(own, "num_key_value_heads"), integer(own, "head_dim")


def _widths(config: Config, first_shared: int, num_layers: int) -> dict[str, Any]:
    """Returns the widths of MLPs if they are wider in layers that read the keys and values of others."""
    if first_shared == num_layers or not boolean(config, "use_double_wide_mlp", False):
        return {}
    inner = integer(config, "intermediate_size")
    widths = (inner,) * first_shared + (2 * inner,) * (num_layers - first_shared)
    return {"layer_inner": widths, "intermediate_size": 2 * inner}


def _experts(config: Config, num_layers: int) -> Experts | None:
    if not boolean(config, "enable_moe_block", False):
        return None
    return Experts(
        num_experts=integer(config, "num_experts"),
        num_per_token=integer(config, "top_k_experts"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        layers=frozenset(range(num_layers)),
        normalise=True,
        beside_mlp=True,
    )
