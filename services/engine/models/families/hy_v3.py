"""Hunyuan 3: experts after the first layer, chosen by corrected sigmoids, and a shared expert without gate.

Attention has norms per head before the rotation.
"""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    expert_layers,
    integer,
    llama_like,
    number,
    refuse_unless,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("HYV3ForCausalLM",)
ABOUT = About(models="Hunyuan 3", limits="layers that predict further tokens are not used")
layout = named_layout(
    Names(
        router="mlp.router.gate",
        correction="mlp.expert_bias",
        shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    )
)
_THETA, _SCALE = 11_158_840.0, 2.826


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    refuse_unless(config, "mlp_bias", False)
    bias, num_layers = boolean(config, "attention_bias", False), integer(config, "num_hidden_layers")
    size = integer(config, "moe_intermediate_size")
    experts = Experts(
        num_experts=integer(config, "num_experts", config.get("num_local_experts")),
        num_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=size,
        layers=expert_layers(config, int(number(config, "first_k_dense_replace", 1))),
        normalise=True,
        shared_intermediate_size=size * int(number(config, "num_shared_experts", 1)),
        shared_gate=False,
        scoring="sigmoid",
        correction=True,
        scale=number(config, "router_scaling_factor", _SCALE),
    )
    fields = {"rope_theta": _THETA, "rms_norm_eps": 1e-5, **config, "head_dim": integer(config, "head_dim", 128)}
    extra = max(1, int(number(config, "num_nextn_predict_layers", 1)))
    return llama_like(
        fields,
        "hy_v3",
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        experts=experts,
        other_parts=tuple(f"model.layers.{num_layers + index}." for index in range(extra)),
    )
