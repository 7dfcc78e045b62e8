"""Hunyuan 1 (dense and with experts): Llama whose queries and keys are normalised per head after the rotation.

With experts, every layer has them and a shared one without gate, all of the same size.
"""

from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    config_error,
    integer,
    llama_like,
    number,
    refuse_unless,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM")
ABOUT = {
    "HunYuanDenseV1ForCausalLM": About(models="Hunyuan 1 (dense)"),
    "HunYuanMoEV1ForCausalLM": About(
        models="Hunyuan 1 with experts",
        tools=("hunyuan",),
        reasoning=("hunyuan",),
        limits="every layer must have the same number of experts",
    ),
}
layout = named_layout(
    Names(
        qk_norm=("self_attn.query_layernorm", "self_attn.key_layernorm"),
        router="mlp.gate.wg",
        shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    )
)
_EPS = 1e-5


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    refuse_unless(config, "use_qk_norm", True)
    refuse_unless(config, "use_cla", False)
    bias = boolean(config, "attention_bias", False)
    return llama_like(
        _stretched({"rms_norm_eps": _EPS, **config}),
        "hunyuan",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        qk_norm_rotated=True,
        experts=_experts(config) if "HunYuanMoEV1" in " ".join(config["architectures"]) else None,
    )


def _stretched(config: Config) -> Config:
    """Returns the config with the rotary base stretched by `alpha`, a kind of scaling that only this family has."""
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "dynamic"):
        raise config_error(f"positions scaled by {kind!r} are not supported for this architecture.")
    alpha = number(scaling, "alpha", 0.0)
    theta = number({**config, **scaling}, "rope_theta", 10_000.0)
    if kind == "dynamic" and alpha:
        head_dim = integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))
        theta *= alpha ** (head_dim / (head_dim - 2))
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _experts(config: Config) -> Experts:
    """Returns the experts. Fields may list one value per layer, which must be the same for all layers."""
    size = _same(config, "moe_intermediate_size", config.get("intermediate_size"))
    return Experts(
        num_experts=_same(config, "num_experts"),
        num_per_token=_same(config, "moe_topk", config.get("num_experts_per_tok")),
        intermediate_size=size,
        layers=frozenset(range(integer(config, "num_hidden_layers"))),
        normalise=True,
        shared_intermediate_size=size * _same(config, "num_shared_expert", 1),
        shared_gate=False,
    )


def _same(config: Config, name: str, default: Any = None) -> int:
    value = config.get(name)
    if not isinstance(value, list):
        return integer(config, name, default)
    if len(set(value)) != 1:
        raise config_error(f"'{name}' must be the same for all layers.")
    return integer({name: value[0]}, name)
