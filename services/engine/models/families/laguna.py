"""Laguna: attention with a softplus gate on its output, sliding windows, layers with different numbers of query heads.

Layers with a window have a rotary embedding of their own. The experts, which the first layers lack, are chosen by
corrected sigmoids, beside a shared one without gate.
"""

from collections.abc import Mapping
from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    config_error,
    expert_layers,
    integer,
    layer_windows,
    llama_like,
    number,
    ropes_by_kind,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("LagunaForCausalLM",)
ABOUT = About(
    tools=("glm45",),
    reasoning=("qwen3",),
    limits="where layers have different numbers of heads: no LoRA",
)
layout = named_layout(
    Names(
        attention_gate="self_attn.g_proj",
        correction="mlp.experts.e_score_correction_bias",
    )
)
_HEAD_DIM, _WINDOW, _CONTEXT = 128, 512, 131_072
_ROPES: Mapping[str, Config] = {
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0},
}


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `gating` is true, which means `per-head`, or names how many gates there are."""
    gating = config.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise config_error(f"'gating' must be true, 'per-head' or 'per-element', not {gating!r}.")
    if number(config, "moe_router_logit_softcapping", 0.0) or boolean(
        config, "moe_apply_router_weight_on_input", False
    ):
        raise config_error("a cap on the router's logits, or its weights on the inputs of experts, is not supported.")
    bias, num_layers = boolean(config, "attention_bias", False), integer(config, "num_hidden_layers")
    head_dim, heads = integer(config, "head_dim", _HEAD_DIM), _heads(config, num_layers)
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    return llama_like(
        {
            "max_position_embeddings": _CONTEXT,
            **config,
            "head_dim": head_dim,
            "rope_parameters": None,
            "num_attention_heads": max(heads),
        },
        "laguna",
        layer_heads=heads if len(set(heads)) > 1 else (),
        qk_norm=True,
        attention_gate=True,
        gate_kind="softplus",
        gate_per_head=gating != "per-element",
        qkv_bias=bias,
        o_bias=bias,
        sliding_windows=layer_windows({**config, "layer_types": kinds}, integer(config, "sliding_window", _WINDOW)),
        experts=_experts(config),
        **ropes_by_kind({"max_position_embeddings": _CONTEXT, **config}, head_dim, _ROPES),
    )


def _heads(config: Config, num_layers: int) -> tuple[int, ...]:
    """Returns the number of query heads of each layer."""
    heads: Any = config.get("num_attention_heads_per_layer")
    if heads is None:
        return (integer(config, "num_attention_heads"),) * num_layers
    if not isinstance(heads, list) or len(heads) != num_layers:
        raise config_error(f"'num_attention_heads_per_layer' must list {num_layers} numbers.")
    kv_heads = integer(config, "num_key_value_heads")
    if any(not isinstance(count, int) or count < 1 or count % kv_heads for count in heads):
        raise config_error(
            f"'num_attention_heads_per_layer' must have multiples of 'num_key_value_heads' ({kv_heads})."
        )
    return tuple(heads)


def _experts(config: Config) -> Experts:
    return Experts(
        num_experts=integer(config, "num_experts"),
        num_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        layers=expert_layers(config, 1),
        normalise=True,
        shared_intermediate_size=integer(config, "shared_expert_intermediate_size"),
        shared_gate=False,
        scoring="sigmoid",
        correction=True,
        scale=number(config, "moe_routed_scaling_factor", 1.0),
    )
