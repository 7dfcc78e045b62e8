"""OLMo 2 and 3: norms after attention and MLP instead of before them, one norm of all query heads and one of all keys.

OLMo 3 has sliding windows in three of four layers, and scales positions only in the other layers.
"""

from typing import Any

from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    integer,
    layer_windows,
    llama_like,
    rope_parameters,
)
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
layout = named_layout(
    Names(after_attention_norm="post_attention_layernorm", after_mlp_norm="post_feedforward_layernorm")
)
_WINDOW, _PATTERN, _THETA, _EPS = 4096, 4, 500_000.0, 1e-5


def describe(config: Config) -> DecoderDescription:
    """Returns the description. The architecture's name distinguishes the two versions."""
    third = bool({"Olmo3ForCausalLM", "Olmo3Model"}.intersection(config["architectures"]))
    bias = boolean(config, "attention_bias", False)
    fields = {"rms_norm_eps": _EPS, **config}
    details = _third(config) if third else {}
    if third:
        fields |= {"rope_parameters": None, "rope_scaling": None}
    return llama_like(
        fields, "olmo2", residual="post_normed", qk_norm=True, whole_qk_norm=True, qkv_bias=bias, o_bias=bias, **details
    )


def _third(config: Config) -> dict[str, Any]:
    """Returns OLMo 3's part of the description. Older configs give one `rope_theta` and `rope_scaling` for all."""
    num_layers, hidden = integer(config, "num_hidden_layers"), integer(config, "hidden_size")
    head_dim = integer(config, "head_dim", hidden // integer(config, "num_attention_heads"))
    kinds = ["sliding_attention" if (layer + 1) % _PATTERN else "full_attention" for layer in range(num_layers)]
    windows = layer_windows(
        {**config, "layer_types": config.get("layer_types") or kinds}, integer(config, "sliding_window", _WINDOW)
    )
    by_kind, context = config.get("rope_parameters") or {}, integer(config, "max_position_embeddings", 2048)
    usual = {"rope_theta": config.get("rope_theta") or _THETA}
    local = {**usual, **(by_kind.get("sliding_attention") or {})}
    full = {**usual, **(config.get("rope_scaling") or {}), **(by_kind.get("full_attention") or {})}
    local_rope, _ = rope_parameters({"rope_parameters": local, "max_position_embeddings": context}, head_dim)
    rope, longest = rope_parameters({"rope_parameters": full, "max_position_embeddings": context}, head_dim)
    return {"sliding_windows": windows, "rope": rope, "local_rope": local_rope, "max_positions": longest}
