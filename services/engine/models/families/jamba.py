"""Jamba: most layers have a state space (Mamba 1) in place of attention without positions; some have experts.

The norms of what the step, B and C are made of have weights.
"""

from typing import Any

from antiphon.services.engine.models.config_fields import Config, config_error, integer, llama_like, number
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import Names, named_layout
from antiphon.services.engine.models.state_spaces import FEED_FORWARD_NAMES, channel_names_under, channel_space

ARCHITECTURES = ("JambaForCausalLM",)
layout = named_layout(
    Names(
        **channel_names_under("mamba"),
        **FEED_FORWARD_NAMES,
        router="feed_forward.router",
        expert_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
        expert_down="feed_forward.experts.{}.down_proj",
    )
)
_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "max_position_embeddings": 262_144}


def describe(config: Config) -> DecoderDescription:
    """Returns the description."""
    num_layers = integer(config, "num_hidden_layers", 32)
    attending = _layers(config, "attn_layer", 8, 4)
    if not attending:
        raise config_error("'attn_layer_period' and 'attn_layer_offset' leave no layer with attention.")
    state_spaces = frozenset(range(num_layers)) - attending
    recurrent = channel_space(
        config,
        state_spaces,
        channels=integer(config, "mamba_expand", 2) * integer(config, "hidden_size"),
        state_dim=integer(config, "mamba_d_state", 16),
        step_rank=config.get("mamba_dt_rank", "auto"),
        kernel_size=integer(config, "mamba_d_conv", 4),
        biases=("mamba_proj_bias", "mamba_conv_bias"),
        part_norms="weighted",
        norm_eps=number(config, "rms_norm_eps", 1e-6),
    )
    return llama_like(
        {**_DEFAULTS, **config},
        "jamba",
        rope=None,
        experts=_experts(config),
        recurrent=recurrent if state_spaces else None,
    )


def _layers(config: Config, kind: str, period: int, offset: int) -> frozenset[int]:
    """Returns the layers of a kind: every n-th one, from an offset on."""
    period, first = integer(config, f"{kind}_period", period), int(number(config, f"{kind}_offset", offset))
    return frozenset(layer for layer in range(integer(config, "num_hidden_layers", 32)) if layer % period == first)


def _experts(config: Config) -> Experts | None:
    count = integer(config, "num_experts", config.get("num_local_experts") or 16)
    if count == 1:
        return None
    return Experts(
        num_experts=count,
        num_per_token=integer(config, "num_experts_per_tok", 2),
        intermediate_size=integer(config, "intermediate_size"),
        layers=_layers(config, "expert_layer", 2, 1),
        normalise=False,
    )
