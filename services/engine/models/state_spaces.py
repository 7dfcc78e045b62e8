"""Reads the config.json fields that families with state spaces (Mamba) have in common. Called by their modules."""

import math
from typing import Any

from antiphon.services.engine.models.config_fields import Config, activation, boolean, config_error, integer, number
from antiphon.services.engine.models.recurrent_kinds import ChannelSpace, StateSpace

CONTEXT = 32_768
"""Longest context of a model whose config names none, because it has state spaces only."""
_RECURRENT, _ATTENTION = ("mamba", "mamba2", "linear_attention"), ("attention", "full_attention", "hybrid")


def names_under(prefix: str) -> dict[str, Any]:
    """Returns the names of a state space's tensors, fields of `layout.Names`, if they begin with a prefix."""
    return {
        "mix_in": (f"{prefix}.in_proj",),
        "mix_out": f"{prefix}.out_proj",
        "conv": f"{prefix}.conv1d",
        "mix_norm": f"{prefix}.norm",
        "decay": f"{prefix}.A_log",
        "decay_bias": f"{prefix}.dt_bias",
        "skip": f"{prefix}.D",
    }


MAMBA_NAMES = names_under("mamba")
FEED_FORWARD_NAMES: dict[str, Any] = {
    "final_norm": "model.final_layernorm",
    "mlp_norm": "pre_ff_layernorm",
    "up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "down": "feed_forward.down_proj",
}
"""The names outside of mixers that Jamba and models after it have."""


def listed_layers(config: Config, kinds: object) -> frozenset[int]:
    """Returns the layers with a state space in place of attention, by a list of their kinds; None: all of them."""
    num_layers = integer(config, "num_hidden_layers")
    if kinds is None:
        return frozenset(range(num_layers))
    known = {*_RECURRENT, *_ATTENTION}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not known.issuperset(kinds):
        raise config_error(f"'layer_types' must say 'mamba' or 'attention' for each of {num_layers} layers.")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind in _RECURRENT)


def state_space(config: Config, layers: frozenset[int], width: int = 0, **details: Any) -> StateSpace:
    """Returns the state space of a config whose fields about it begin with `mamba_`.

    `width`: of all heads together, if it is not a multiple of the hidden size; `details`: further fields.
    """
    inner = width or integer(config, "mamba_expand", 2) * integer(config, "hidden_size")
    num_heads = integer(config, "mamba_n_heads", 128)
    asked = config.get("mamba_d_head", "auto")
    head_dim = inner // num_heads if asked in ("auto", None) else integer(config, "mamba_d_head")
    if num_heads * head_dim != inner:
        raise config_error(f"'mamba_n_heads' times 'mamba_d_head' must be the width of state spaces, {inner}.")
    return checked(
        StateSpace(
            layers=layers,
            num_heads=num_heads,
            head_dim=head_dim,
            state_dim=integer(config, "mamba_d_state", 256),
            num_groups=integer(config, "mamba_n_groups", 1),
            kernel_size=integer(config, "mamba_d_conv", 4),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
            bias=boolean(config, "mamba_proj_bias", False),
            conv_bias=boolean(config, "mamba_conv_bias", True),
            step_limits=step_limits(config),
            **details,
        )
    )


def checked(shape: StateSpace) -> StateSpace:
    """Returns the state space. Raises ServiceError unless its groups have equally many heads."""
    if shape.num_heads % shape.num_groups:
        raise config_error(f"the {shape.num_heads} heads of state spaces do not divide by {shape.num_groups} groups.")
    return shape


def step_limits(config: Config) -> tuple[float, float]:
    """Returns the limits of dt, of which the upper one is infinite in most models.

    Transformers writes infinity, which JSON lacks, as `{"__float__": "Infinity"}`.
    """
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    try:
        least, most = (float(each["__float__"] if isinstance(each, dict) else each) for each in limits)
    except (KeyError, TypeError, ValueError) as error:
        raise config_error(f"'time_step_limit' must be two numbers, not {limits!r}.") from error
    return least, most


def channel_names_under(prefix: str) -> dict[str, Any]:
    """Returns the names of the tensors of a `ChannelSpace`, fields of `layout.Names`, if they begin with a prefix."""
    return {
        **names_under(prefix),
        "mix_norm": "",
        "mix_select": f"{prefix}.x_proj",
        "mix_step": f"{prefix}.dt_proj",
        "decay_bias": f"{prefix}.dt_proj.bias",
        "select_norms": tuple(f"{prefix}.{part}_layernorm" for part in ("dt", "b", "c")),
    }


def channel_space(
    config: Config, layers: frozenset[int], *, step_rank: object, biases: tuple[str, str], **details: Any
) -> ChannelSpace:
    """Returns the state space (Mamba 1) of a config.

    `step_rank`: the rank of the projection of the step, or `auto`; `biases`: the names of the fields that say whether
    the outer projections and the convolution have biases; `details`: further fields of `ChannelSpace`.
    """
    if activation(config) != "silu":
        raise config_error("state spaces with another activation than silu are not supported.")
    rank = -(-integer(config, "hidden_size") // 16) if step_rank == "auto" else integer({"rank": step_rank}, "rank")
    bias, conv_bias = (boolean(config, name, default) for name, default in zip(biases, (False, True), strict=True))
    return ChannelSpace(layers=layers, step_rank=rank, bias=bias, conv_bias=conv_bias, **details)


def without_attention(config: Config) -> dict[str, Any]:
    """Returns a config with what it lacks because no layer attends: the heads of the cache that blocks consist of."""
    return {
        "max_position_embeddings": CONTEXT,
        **config,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "intermediate_size": 1,
    }
