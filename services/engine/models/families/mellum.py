"""Mellum 2: Qwen3 with experts, sliding windows in some layers, and another rotary embedding in those layers."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    expert_layers,
    integer,
    layer_windows,
    llama_like,
    ropes_by_kind,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("MellumForCausalLM",)
ABOUT = About(models="Mellum 2", limits="the layer that predicts further tokens is not used")
layout = llama_layout
_HEAD_DIM, _WINDOW = 128, 1024
_THETAS = {"full_attention": 500_000.0, "sliding_attention": 10_000.0}


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    bias, num_layers = boolean(config, "attention_bias", False), integer(config, "num_hidden_layers")
    fields = {**config, "head_dim": integer(config, "head_dim", _HEAD_DIM), "rope_parameters": None}
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    experts = Experts(
        num_experts=integer(config, "num_experts", config.get("num_local_experts")),
        num_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        layers=expert_layers(config, 0),
        normalise=boolean(config, "norm_topk_prob", True),
    )
    return llama_like(
        fields,
        "mellum",
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        experts=experts,
        sliding_windows=layer_windows({**config, "layer_types": kinds}, integer(config, "sliding_window", _WINDOW)),
        other_parts=("mtp.",),
        **ropes_by_kind(config, fields["head_dim"], {kind: {"rope_theta": theta} for kind, theta in _THETAS.items()}),
    )
