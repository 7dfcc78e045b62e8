"""Llama 4: most layers rotate heads and see chunks of tokens, the others see all; experts read weighted inputs.

Only layers without rotary embedding have queries that grow with the position.
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
    unrotated_layers,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts, QueryGrowth
from antiphon.services.engine.models.layout import Names, Parameter, named_layout

ARCHITECTURES = ("Llama4ForCausalLM",)
ABOUT = About(tools=("pythonic",))
_NAMES: dict[str, Any] = {
    "up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "down": "feed_forward.down_proj",
    "router": "feed_forward.router",
    "shared_up": ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    "shared_down": "feed_forward.shared_expert.down_proj",
}
_joined = named_layout(
    Names(
        **_NAMES,
        stacked_up="feed_forward.experts.gate_up_proj",
        stacked_down="feed_forward.experts.down_proj",
        stacked_in_order=True,
    )
)
_split = named_layout(
    Names(
        **_NAMES,
        expert_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
        expert_down="feed_forward.experts.{}.down_proj",
    )
)
_SPLIT_FAMILY = "llama4_split"
_CHUNK, _HEAD_DIM, _INTERMEDIATE = 8192, 128, 16_384
_USUAL: Config = {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072}
_KINDS = ("full_attention", "chunked_attention")


def layout(description: DecoderDescription, /) -> tuple[Parameter, ...]:
    """Returns the parameters."""
    return (_split if description.family == _SPLIT_FAMILY else _joined)(description)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `intermediate_size` is the size of one expert, `intermediate_size_mlp` that of MLPs.

    `split_projections`: whether experts are tensors of their own (GGUF).
    """
    bias, growth, unrotated = boolean(config, "attention_bias", False), None, unrotated_layers(config)
    if config.get("attn_temperature_tuning", True):  # the first configs have a number
        growth = QueryGrowth(number(config, "attn_scale", 0.1), _floor_scale(config), first=1, unrotated=True)
    fields: dict[str, Any] = {
        **_USUAL,
        **config,
        "head_dim": integer(config, "head_dim", _HEAD_DIM),
        "intermediate_size": integer(config, "intermediate_size_mlp", _INTERMEDIATE),
    }
    return llama_like(
        fields,
        _SPLIT_FAMILY if boolean(config, "split_projections", False) else "llama4",
        interleaved=True,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=boolean(config, "use_qk_norm", True),
        qk_norm_rotated=True,
        qk_norm_weights=False,
        query_growth=growth,
        unrotated_layers=unrotated,
        sliding_windows=_windows(config, unrotated),
        chunked_windows=True,
        experts=_experts(config),
    )


def _floor_scale(config: Config) -> int:
    """Returns the number of positions after which queries grow, which configs may write as a float."""
    scale = number(config, "floor_scale", _CHUNK)
    if scale < 1 or scale != int(scale):
        raise config_error(f"'floor_scale' must be a positive integer, not {scale!r}.")
    return int(scale)


def _windows(config: Config, unrotated: frozenset[int]) -> tuple[int | None, ...]:
    """Returns each layer's chunk. `layer_types` lists the layers that have one; without it, those that rotate heads."""
    num_layers, kinds = integer(config, "num_hidden_layers"), config.get("layer_types")
    if kinds is None:
        kinds = [_KINDS[layer not in unrotated] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS):
        raise config_error(f"'layer_types' must say {' or '.join(map(repr, _KINDS))} for each of {num_layers} layers.")
    chunk = None
    if config.get("attention_chunk_size", _CHUNK) is not None:
        chunk = integer(config, "attention_chunk_size", _CHUNK)
    return tuple(chunk if kind == "chunked_attention" else None for kind in kinds)


def _experts(config: Config) -> Experts:
    num_layers, step = integer(config, "num_hidden_layers"), integer(config, "interleave_moe_layer_step", 1)
    layers = config.get("moe_layers")
    if layers is None:
        layers = range(step - 1, num_layers, step)
    size = integer(config, "intermediate_size")
    return Experts(
        num_experts=integer(config, "num_local_experts", 16),
        num_per_token=integer(config, "num_experts_per_tok", 1),
        intermediate_size=size,
        layers=frozenset(layers),
        normalise=False,
        shared_intermediate_size=size,
        shared_gate=False,
        scoring="sigmoid",
        weighted_inputs=True,
    )
