"""DeepSeek V2, V2-Lite, V3 and R1, Kimi K2, GLM 4.7 Flash, Mistral 4, Youtu: decoders with latent attention.

All except Youtu have experts after the first layers, and shared experts without a gate. V2 weights experts by a softmax
and may choose groups by their best expert. The others choose groups by their two best experts. Mistral 4 weights
experts by a softmax, and its queries grow with the position; the rest weight experts by sigmoids and correct the scores
for the selection. The factor for scaled positions (`mscale_all_dim`) is applied to queries and to keys.
"""

import dataclasses
import math
from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    config_error,
    expert_layers,
    integer,
    llama_like,
    number,
    refuse_unless,
    rope_parameters,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts, LatentAttention
from antiphon.services.engine.models.families.glm4_moe import expert_groups
from antiphon.services.engine.models.families.mistral import query_growth
from antiphon.services.engine.models.layout import Names, named_layout

_V2, V3, _GLM, _YOUTU = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"
_MISTRAL = "Mistral4ForCausalLM"
"""Known as a part of checkpoints with a vision encoder (`text_parts`)."""
ARCHITECTURES = (_V2, V3, _GLM, _YOUTU)
_MTP = "`--use-mtp`: C++ and PyTorch"
ABOUT = {
    _V2: About(models="DeepSeek V2, V2-Lite"),
    V3: About(
        models="DeepSeek V3, V3.1 and R1, Kimi K2", tools=("deepseek_v3", "kimi_k2"), reasoning=("qwen3",),
        limits=_MTP,
    ),
    _GLM: About(models="GLM 4.7 Flash", tools=("glm45",), reasoning=("qwen3",), limits=_MTP),
    _YOUTU: About(models="Youtu"),
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    _V2: {"q_lora_rank": 1536, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    V3: {"q_lora_rank": 1536, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    _GLM: {"q_lora_rank": 768, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "v_head_dim": 256,
           "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5},
    _MISTRAL: {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "first_k_dense_replace": 0,
               "max_position_embeddings": 1_048_576},
    _YOUTU: {"q_lora_rank": 1536, "tie_word_embeddings": True},
}  # fmt: skip
"""Fields that a config may leave out."""
layout = named_layout(
    Names(
        shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. A layer after the model's last one may predict further tokens (`with_draft_layer`)."""
    architecture = next(name for name in config["architectures"] if name.replace("Model", "ForCausalLM") in _DEFAULTS)
    architecture = architecture.replace("Model", "ForCausalLM")
    return with_latents({**_DEFAULTS[architecture], **config}, "deepseek", architecture)


def with_latents(fields: dict[str, Any], family: str, architecture: str, **details: Any) -> DecoderDescription:
    """Returns the description of a decoder with all fields that the `architecture` has; `details` replace its own."""
    refuse_unless(fields, "mlp_bias", False)
    num_heads, num_layers = integer(fields, "num_attention_heads"), integer(fields, "num_hidden_layers")
    if integer(fields, "num_key_value_heads", num_heads) != num_heads:
        raise config_error("'num_key_value_heads' must be 'num_attention_heads' where keys are made of latents.")
    latent = _latent(fields)
    bias = boolean(fields, "attention_bias", False)
    if bias and not latent.query_rank:
        raise config_error("'attention_bias': true is not supported without 'q_lora_rank'.")
    if architecture == _MISTRAL:
        # The part of a head that is rotated is `qk_rope_head_dim`.
        fields["rope_parameters"] = {**(fields.get("rope_parameters") or {}), "partial_rotary_factor": 1.0}
    rope, max_positions = rope_parameters(fields, latent.rope_dim)
    adjacent = architecture == _V2 or boolean(fields, "rope_interleave", True)
    common: dict[str, Any] = {
        "rope": dataclasses.replace(rope, interleaved=adjacent),
        "max_positions": max_positions,
        "latent": latent,
        "query_scale": latent.query_dim**-0.5 * _score_factor(fields) ** 2,
        "query_growth": query_growth(fields) if architecture == _MISTRAL else None,
        "qkv_bias": bias,
        "o_bias": bias,
        "experts": None if architecture == _YOUTU else _experts(fields, architecture),
        "offers_draft_layer": True,
        "other_parts": (f"model.layers.{num_layers}.",),
    }
    return llama_like(
        {**fields, "num_key_value_heads": 1, "head_dim": latent.row_size}, family, **{**common, **details}
    )


def _latent(fields: Config) -> LatentAttention:
    return LatentAttention(
        rank=integer(fields, "kv_lora_rank", 512),
        rope_dim=integer(fields, "qk_rope_head_dim", 64),
        nope_dim=integer(fields, "qk_nope_head_dim", 128),
        value_dim=integer(fields, "v_head_dim", 128),
        query_rank=0 if fields["q_lora_rank"] is None else integer(fields, "q_lora_rank"),
    )


def _score_factor(fields: Config) -> float:
    """Returns the factor on queries and on keys for scaled positions."""
    scaling = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    weight, factor = number(scaling, "mscale_all_dim", 0.0), number(scaling, "factor", 1.0)
    return 1.0 if kind == "default" or factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _experts(fields: Config, architecture: str) -> Experts | None:
    if fields.get("n_routed_experts") is None:
        return None
    inner = integer(fields, "moe_intermediate_size")
    return Experts(
        num_experts=integer(fields, "n_routed_experts"),
        num_per_token=integer(fields, "num_experts_per_tok"),
        intermediate_size=inner,
        layers=_expert_layers(fields),
        shared_intermediate_size=inner * _count(fields, "n_shared_experts", 2 if architecture == _V2 else 1),
        shared_gate=False,
        scale=number(fields, "routed_scaling_factor", 1.0),
        **_router(fields, architecture),
    )


def _router(fields: Config, architecture: str) -> dict[str, Any]:
    if architecture == _MISTRAL:
        return {"normalise": boolean(fields, "norm_topk_prob", True), **_groups(fields)}
    return _softmax_router(fields) if architecture == _V2 else _sigmoid_router(fields)


def _softmax_router(fields: Config) -> dict[str, Any]:
    refuse_unless(fields, "norm_topk_prob", False)
    method = fields.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise config_error(f"'topk_method': {method!r} is not supported; supported: greedy, group_limited_greedy.")
    grouped = _groups(fields) if method == "group_limited_greedy" else {}
    return {"normalise": False, "exact_router": True, **grouped, "best_of_group": 1}


def _sigmoid_router(fields: Config) -> dict[str, Any]:
    method, scoring = fields.get("topk_method") or "noaux_tc", fields.get("scoring_func") or "sigmoid"
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise config_error(f"'topk_method': {method!r} with 'scoring_func': {scoring!r} is not supported.")
    normalise = boolean(fields, "norm_topk_prob", True)
    return {"normalise": normalise, "scoring": "sigmoid", "correction": True, **_groups(fields)}


def _groups(fields: Config) -> dict[str, int]:
    groups, chosen = expert_groups(fields)
    return {"num_groups": groups, "num_chosen_groups": chosen}


def _expert_layers(fields: Config) -> frozenset[int]:
    if fields.get("mlp_layer_types") is None and integer(fields, "moe_layer_freq", 1) != 1:
        raise config_error("'moe_layer_freq' other than 1 is not supported.")
    return expert_layers(fields, _count(fields, "first_k_dense_replace", 0))


def _count(fields: Config, name: str, default: int) -> int:
    """Returns a count, which may be 0."""
    return 0 if fields.get(name) == 0 else integer(fields, name, default)
