"""LFM3: gated short convolutions in most layers, attention with a gate for each head in the others; norms all around.

Some of the attending layers have a sliding window and a rotary embedding of their own. The others rotate a part of the
frequencies of a whole head.
"""

from collections.abc import Mapping
from typing import Any

from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    config_error,
    integer,
    llama_like,
    number,
    ropes_by_kind,
)
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout
from antiphon.services.engine.models.recurrent_kinds import ShortConvolution

ARCHITECTURES = ("Lfm3ForCausalLM",)
layout = named_layout(
    Names(
        final_norm="model.embedding_norm",
        input_norm="operator_norm",
        after_attention_norm="post_operator_norm",
        mlp_norm="ffn_norm",
        after_mlp_norm="post_ffn_norm",
        attention_gate="self_attn.gate_proj",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
    )
)
_HEAD_DIM, _WINDOW, _CONTEXT, _KERNEL = 128, 256, 128_000, 7
_ROPES: Mapping[str, Config] = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0},
}


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    kinds, bias = _kinds(config), boolean(config, "attention_bias", False)
    window, head_dim = integer(config, "sliding_window", _WINDOW), integer(config, "head_dim", _HEAD_DIM)
    convolution = ShortConvolution(
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv"),
        channels=integer(config, "hidden_size"),
        kernel_size=integer(config, "conv_L_cache", _KERNEL),
        bias=boolean(config, "conv_bias", False),
    )
    fields: dict[str, Any] = {"max_position_embeddings": _CONTEXT, "tie_word_embeddings": True, **config}
    ropes = ropes_by_kind(fields, head_dim, _ROPES)
    fields |= {"head_dim": head_dim, "rope_parameters": None, "rms_norm_eps": number(config, "norm_eps", 1e-5)}
    return llama_like(
        fields,
        "lfm3",
        residual="normed" if boolean(config, "use_sandwich_norm", True) else "sequential",
        qk_norm=True,
        attention_gate=boolean(config, "use_attention_gate", True),
        gate_per_head=True,
        qkv_bias=bias,
        o_bias=bias,
        activation="silu",
        recurrent=convolution if convolution.layers else None,
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        **ropes,
    )


def _kinds(config: Config) -> list[str]:
    """Returns the kind of each layer; without a list, of four layers one sees all tokens and one has a window."""
    num_layers = integer(config, "num_hidden_layers")
    usual = {0: "sliding_attention", 2: "full_attention"}
    kinds = config.get("layer_types") or [
        usual.get(layer % 4, "conv") if layer else "conv" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {"conv", *_ROPES} or set(kinds) == {"conv"}:
        raise config_error(
            "'layer_types' must say 'conv', 'full_attention' or 'sliding_attention' for each layer, and not 'conv' for "
            "all."
        )
    return kinds
