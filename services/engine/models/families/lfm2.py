"""LFM2 and LFM2 with experts: most layers have a gated short convolution in place of attention.

Attention has norms per head before the rotation. The experts, which the first layers lack, are chosen by corrected
sigmoids.
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
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import Names, named_layout
from antiphon.services.engine.models.recurrent_kinds import ShortConvolution

_MOE = "Lfm2MoeForCausalLM"
ARCHITECTURES = ("Lfm2ForCausalLM", _MOE)
ABOUT = About(models="LFM2 and LFM2.5, also with experts", tools=("lfm2",), reasoning=("qwen3",))
layout = named_layout(
    Names(
        final_norm="model.embedding_norm",
        input_norm="operator_norm",
        mlp_norm="ffn_norm",
        qk_norm=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        o="self_attn.out_proj",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        router="feed_forward.gate",
        correction="feed_forward.expert_bias",
        expert_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
        expert_down="feed_forward.experts.{}.w2",
    )
)
_THETA = 1_000_000.0


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Some fields have had two names."""
    moe = bool({_MOE, "Lfm2MoeModel"}.intersection(config["architectures"]))
    num_layers, hidden = integer(config, "num_hidden_layers"), integer(config, "hidden_size")
    convolution = ShortConvolution(
        layers=_convolutions(config, num_layers),
        channels=hidden,
        kernel_size=integer(config, "conv_L_cache", 3),
        bias=boolean(config, "conv_bias", False),
    )
    if not convolution.layers:
        raise config_error("'layer_types' has no layer of the kind 'conv'.")
    details: dict[str, Any] = {"experts": _experts(config, num_layers)} if moe else {}
    fields: dict[str, Any] = {"rope_theta": _THETA, "max_position_embeddings": 128_000, **config}
    fields["rms_norm_eps"] = number(config, "norm_eps", 1e-5)
    fields["tie_word_embeddings"] = boolean(config, "tie_embedding", boolean(config, "tie_word_embeddings", True))
    fields["intermediate_size"] = integer(config, "intermediate_size") if moe else _intermediate_size(config)
    return llama_like(fields, "lfm2", qk_norm=True, recurrent=convolution, activation="silu", **details)


def _convolutions(config: Config, num_layers: int) -> frozenset[int]:
    """Returns the layers without attention."""
    kinds = config.get("layer_types")
    if kinds is None:
        attending = config.get("full_attn_idxs")
        attending = range(num_layers) if attending is None else attending
        return frozenset(range(num_layers)) - frozenset(attending)
    if len(kinds) != num_layers or not set(kinds) <= {"conv", "full_attention"} or "full_attention" not in kinds:
        raise config_error("'layer_types' must say 'conv' or 'full_attention' for each layer, and not 'conv' for all.")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv")


def _intermediate_size(config: Config) -> int:
    """Returns the width of the MLP, which the config gives before an adjustment."""
    size = integer(config, "block_ff_dim", config.get("intermediate_size"))
    if not boolean(config, "block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.get("block_ffn_dim_multiplier", 1.0) is not None:
        multiple = integer(config, "block_multiple_of", 256)
        size = -(-int(number(config, "block_ffn_dim_multiplier", 1.0) * size) // multiple) * multiple
    return size


def _experts(config: Config, num_layers: int) -> Experts:
    first = int(number(config, "num_dense_layers", 2))
    return Experts(
        num_experts=integer(config, "num_experts"),
        num_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        layers=frozenset(range(first, num_layers)),
        normalise=boolean(config, "norm_topk_prob", True),
        scoring="sigmoid",
        correction=boolean(config, "use_expert_bias", True),
        scale=number(config, "routed_scaling_factor", 1.0),
    )
