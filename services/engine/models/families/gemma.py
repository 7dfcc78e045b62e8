"""Gemma 1, 2 and 3 (text): scaled embeddings, norms by 1 + weight, a tanh-gelu gate, tied embeddings.

Gemma 2 also normalises the outputs of attention and MLP, caps scores and logits, and has a sliding window in every
other layer. Gemma 3 normalises queries and keys instead of capping, has a window in five of six layers, and uses
another rotary base in those layers.
"""

from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    activation,
    boolean,
    config_error,
    integer,
    layer_windows,
    llama_like,
    optional_number,
    rope_parameters,
)
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, Parameter, llama_layout, named_layout

ARCHITECTURES = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
_LIMITS = "causal only"
ABOUT = {
    "GemmaForCausalLM": About(models="Gemma 1", limits=_LIMITS),
    "Gemma2ForCausalLM": About(models="Gemma 2", limits=_LIMITS),
    "Gemma3ForCausalLM": About(models="Gemma 3 (text)", limits=_LIMITS),
}

_HEAD_DIM, _QUERY_SCALAR, _WINDOW = 256, 256, 4096
_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
_NORMED = named_layout(
    Names(
        after_attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        after_mlp_norm="post_feedforward_layernorm",
    )
)


def layout(description: DecoderDescription) -> tuple[Parameter, ...]:
    """Returns the layout. In Gemma 2 and 3, some names of Gemma 1's norms denote other norms."""
    return (_NORMED if description.residual == "normed" else llama_layout)(description)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. The architecture's name distinguishes the three versions."""
    if boolean(config, "use_bidirectional_attention", False):
        raise config_error("'use_bidirectional_attention' is not supported.")
    makers = {"Gemma2ForCausalLM": _second, "Gemma3ForCausalLM": _third}
    details = next((makers[name](config) for name in config["architectures"] if name in makers), {})
    bias = boolean(config, "attention_bias", False)
    fields = {"head_dim": _HEAD_DIM, "tie_word_embeddings": True, "max_position_embeddings": 8192, **config}
    common: dict[str, Any] = {
        "norm": "rms_plus_one",
        "activation": _activation(config),
        "embedding_scale": integer(config, "hidden_size") ** 0.5,
        "qkv_bias": bias,
        "o_bias": bias,
    }
    fields.update(details.pop("fields", {}))
    return llama_like(fields, "gemma", **common, **details)


def _activation(config: Config) -> Any:
    """Returns the activation function. Early configs name `gelu` but mean its tanh approximation."""
    name = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    return "gelu_tanh" if name == "gelu" else activation({"hidden_act": name})


def _second(config: Config) -> dict[str, Any]:
    return {
        "residual": "normed",
        "query_scale": integer(config, "query_pre_attn_scalar", _QUERY_SCALAR) ** -0.5,
        "attention_softcap": optional_number({"attn_logit_softcapping": 50.0, **config}, "attn_logit_softcapping"),
        "logits_softcap": optional_number({"final_logit_softcapping": 30.0, **config}, "final_logit_softcapping"),
        "sliding_windows": _windows(config, 2),
    }


def _third(config: Config) -> dict[str, Any]:
    """Returns Gemma 3's part of the description.

    Rotary parameters are given per kind of layer, or in older configs in `rope_local_base_freq`, `rope_theta` and
    `rope_scaling`.
    """
    by_kind = config.get("rope_parameters") or {}
    local = by_kind.get("sliding_attention") or {"rope_theta": config.get("rope_local_base_freq") or _LOCAL_THETA}
    scaling = config.get("rope_scaling") or {}
    full = by_kind.get("full_attention") or {"rope_theta": config.get("rope_theta") or _GLOBAL_THETA, **scaling}
    head_dim = integer(config, "head_dim", _HEAD_DIM)
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    context = integer(config, "max_position_embeddings", 131_072)
    # The context length in the config already includes the scaling.
    local_rope, _ = rope_parameters({"rope_parameters": local, "max_position_embeddings": context}, head_dim)
    full_rope, _ = rope_parameters({"rope_parameters": full, "max_position_embeddings": context}, head_dim)
    return {
        "residual": "normed",
        "qk_norm": True,
        "query_scale": integer(config, "query_pre_attn_scalar", _QUERY_SCALAR) ** -0.5,
        "attention_softcap": optional_number(config, "attn_logit_softcapping"),
        "logits_softcap": optional_number(config, "final_logit_softcapping"),
        "sliding_windows": _windows(config, pattern),
        "rope": full_rope,
        "local_rope": local_rope,
        "max_positions": context,
        "fields": {"rope_parameters": None, "rope_scaling": None},
    }


def _windows(config: Config, pattern: int) -> tuple[int | None, ...]:
    """Returns each layer's window. Without `layer_types` (old configs), every `pattern`-th layer has full attention."""
    layers = range(integer(config, "num_hidden_layers"))
    kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in layers]
    listed = config.get("layer_types") or kinds
    return layer_windows({**config, "layer_types": listed}, integer(config, "sliding_window", _WINDOW))
