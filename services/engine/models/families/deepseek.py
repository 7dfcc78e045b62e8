"""Decoders with latent attention: DeepSeek V2, V2-Lite, V3 and R1, Kimi K2, GLM 4.7 Flash, Youtu.

All except Youtu have experts after the first layers, and shared experts without a gate. V2 weights experts by a softmax
and may choose groups by their best expert. The others weight experts by sigmoids, correct the scores for the selection,
and choose groups by their two best experts. The factor for scaled positions (`mscale_all_dim`) is applied to queries
and to keys.
"""

import dataclasses
import math
from typing import Any

from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    config_error,
    integer,
    llama_like,
    number,
    refuse_unless,
    rope_parameters,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts, LatentAttention
from antiphon.services.engine.models.families.glm4_moe import expert_groups
from antiphon.services.engine.models.layout import Names, named_layout

_V2, _V3, _GLM, _YOUTU = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM"
ARCHITECTURES = (_V2, _V3, _GLM, _YOUTU)
_DEFAULTS: dict[str, dict[str, Any]] = {
    _V2: {"q_lora_rank": 1536, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    _V3: {"q_lora_rank": 1536, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    _GLM: {"q_lora_rank": 768, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "v_head_dim": 256,
           "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5},
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
    """Returns the description. Layers after the model's last one, which predict further tokens, are not loaded."""
    architecture = next(name for name in config["architectures"] if name.replace("Model", "ForCausalLM") in _DEFAULTS)
    architecture = architecture.replace("Model", "ForCausalLM")
    fields: dict[str, Any] = {**_DEFAULTS[architecture], **config}
    refuse_unless(fields, "mlp_bias", False)
    num_heads, num_layers = integer(fields, "num_attention_heads"), integer(fields, "num_hidden_layers")
    if integer(fields, "num_key_value_heads", num_heads) != num_heads:
        raise config_error("'num_key_value_heads' must be 'num_attention_heads' where keys are made of latents.")
    latent = _latent(fields)
    bias = boolean(fields, "attention_bias", False)
    if bias and not latent.query_rank:
        raise config_error("'attention_bias': true is not supported without 'q_lora_rank'.")
    rope, max_positions = rope_parameters(fields, latent.rope_dim)
    adjacent = architecture == _V2 or boolean(fields, "rope_interleave", True)
    return llama_like(
        {**fields, "num_key_value_heads": 1, "head_dim": latent.row_size},
        "deepseek",
        rope=dataclasses.replace(rope, interleaved=adjacent),
        max_positions=max_positions,
        latent=latent,
        query_scale=latent.query_dim**-0.5 * _score_factor(fields) ** 2,
        qkv_bias=bias,
        o_bias=bias,
        experts=None if architecture == _YOUTU else _experts(fields, architecture, num_layers),
        other_parts=(f"model.layers.{num_layers}.",),
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


def _experts(fields: Config, architecture: str, num_layers: int) -> Experts | None:
    if fields.get("n_routed_experts") is None:
        return None
    inner = integer(fields, "moe_intermediate_size")
    return Experts(
        num_experts=integer(fields, "n_routed_experts"),
        num_per_token=integer(fields, "num_experts_per_tok"),
        intermediate_size=inner,
        layers=_expert_layers(fields, num_layers),
        shared_intermediate_size=inner * _count(fields, "n_shared_experts", 2 if architecture == _V2 else 1),
        shared_gate=False,
        scale=number(fields, "routed_scaling_factor", 1.0),
        **(_softmax_router(fields) if architecture == _V2 else _sigmoid_router(fields)),
    )


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


def _expert_layers(fields: Config, num_layers: int) -> frozenset[int]:
    kinds = fields.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            raise config_error(f"'mlp_layer_types' must list {num_layers} layers, each 'dense' or 'sparse'.")
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if integer(fields, "moe_layer_freq", 1) != 1:
        raise config_error("'moe_layer_freq' other than 1 is not supported.")
    return frozenset(range(_count(fields, "first_k_dense_replace", 0), num_layers))


def _count(fields: Config, name: str, default: int) -> int:
    """Returns a count, which may be 0."""
    return 0 if fields.get(name) == 0 else integer(fields, name, default)
