"""Falcon H1: each layer has attention and a state space (Mamba 2) side by side, and factors on all its parts.

The factors on the inputs and outputs of both mixers are those on the scores and on what the mixers give.
"""

from typing import Any

from antiphon.services.engine.models.config_fields import Config, boolean, config_error, integer, llama_like, number
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout
from antiphon.services.engine.models.recurrent_kinds import StateSpace
from antiphon.services.engine.models.state_spaces import FEED_FORWARD_NAMES, MAMBA_NAMES, state_space

ARCHITECTURES = ("FalconH1ForCausalLM",)
layout = named_layout(Names(**MAMBA_NAMES, **FEED_FORWARD_NAMES))
_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


def describe(config: Config) -> DecoderDescription:
    """Returns the description."""
    fields: dict[str, Any] = {**_DEFAULTS, **config}
    attention_in, attention_out = _factor(config, "attention_in"), _factor(config, "attention_out")
    head_dim = integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))
    gate, down = _factors(config, "mlp_multipliers", 2)
    _refuse_scaled_biases(config, "attention_bias", (attention_in, attention_out, _factor(config, "key")))
    _refuse_scaled_biases(config, "mlp_bias", (down,))
    bias = boolean(config, "attention_bias", False)
    return llama_like(
        fields,
        "falcon_h1",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=boolean(config, "mlp_bias", False),
        query_scale=head_dim**-0.5 * attention_in**2 * _factor(config, "key"),
        attended_scale=attention_in * attention_out,
        mlp_scales=(gate, down),
        embedding_scale=_factor(config, "embedding"),
        rounded_embedding_scale=False,
        logits_scale=_factor(config, "lm_head"),
        recurrent=_state_space(config, fields),
        attends_beside=True,
    )


def _state_space(config: Config, fields: Config) -> StateSpace:
    """Returns the state space. It has a norm if `mamba_rms_norm`, before the gates if `mamba_norm_before_gate`."""
    into, out = _factor(config, "ssm_in"), _factor(config, "ssm_out")
    z, x, inner, outer, step = (into * factor for factor in _factors(config, "ssm_multipliers", 5))
    _refuse_scaled_biases(config, "mamba_proj_bias", (into, out))
    if boolean(config, "projectors_bias", False) != boolean(config, "mamba_proj_bias", False):
        raise config_error("'projectors_bias' must be the same as 'mamba_proj_bias'.")
    norm = "none"
    if boolean(config, "mamba_rms_norm", False):
        norm = "before_gates" if boolean(config, "mamba_norm_before_gate", True) else "gated"
    width = integer(config, "mamba_d_ssm", 1024)
    if "mamba_d_ssm" in config and config["mamba_d_ssm"] is None:
        width = integer(config, "mamba_expand", 2) * integer(config, "hidden_size")
    return state_space(
        fields,
        frozenset(range(integer(config, "num_hidden_layers"))),
        width=width,
        norm=norm,
        scales=(z, x, inner, outer, step),
        out_scale=out,
    )


def _factor(config: Config, name: str) -> float:
    return number(config, f"{name}_multiplier", 1.0)


def _factors(config: Config, name: str, count: int) -> tuple[float, ...]:
    found = config.get(name)
    if found is None:
        return (1.0,) * count
    if not isinstance(found, list | tuple) or len(found) != count:
        raise config_error(f"'{name}' must list {count} numbers.")
    return tuple(number({name: each}, name, 1.0) for each in found)


def _refuse_scaled_biases(config: Config, name: str, factors: tuple[float, ...]) -> None:
    if boolean(config, name, False) and any(factor != 1.0 for factor in factors):
        raise config_error(f"'{name}' with factors on the same projections is not supported.")
