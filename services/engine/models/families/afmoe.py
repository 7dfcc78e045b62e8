"""Trinity (AFMoE): attention with a gate on its output, norms before and after each part, experts in most layers.

Three of four layers have a sliding window, and only those have rotary embedding. The experts are chosen by corrected
sigmoids, beside shared ones without gate.
"""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    config_error,
    integer,
    layer_windows,
    llama_like,
    number,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("AfmoeForCausalLM",)
ABOUT = About(models="Trinity", tools=("qwen3_coder",), reasoning=("qwen3",))
layout = named_layout(
    Names(
        after_attention_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        after_mlp_norm="post_mlp_layernorm",
        attention_gate="self_attn.gate_proj",
        router="mlp.router.gate",
        correction="mlp.expert_bias",
        shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    )
)
_HEAD_DIM, _WINDOW, _CONTEXT, _PATTERN = 128, 1024, 16_384, 4


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    for name, expected in (("n_group", 1), ("topk_group", 1), ("score_func", "sigmoid"), ("route_norm", True)):
        if config.get(name, expected) not in (expected, None):
            raise config_error(f"'{name}' must be {expected!r}, not {config[name]!r}.")
    bias, num_layers = boolean(config, "attention_bias", False), integer(config, "num_hidden_layers")
    every = integer(config, "global_attn_every_n_layers", _PATTERN)
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    windows = layer_windows(
        {**config, "layer_types": config.get("layer_types") or kinds}, integer(config, "sliding_window", _WINDOW)
    )
    fields = {"rms_norm_eps": 1e-5, "max_position_embeddings": _CONTEXT, **config}
    return llama_like(
        {**fields, "head_dim": integer(config, "head_dim", _HEAD_DIM)},
        "afmoe",
        residual="normed",
        qk_norm=True,
        attention_gate=True,
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=integer(config, "hidden_size") ** 0.5 if boolean(config, "mup_enabled", False) else 1.0,
        rounded_embedding_scale=False,
        sliding_windows=windows,
        unrotated_layers=frozenset(layer for layer, window in enumerate(windows) if window is None),
        experts=_experts(config, num_layers),
    )


def _experts(config: Config, num_layers: int) -> Experts:
    size = integer(config, "moe_intermediate_size")
    return Experts(
        num_experts=integer(config, "num_experts"),
        num_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=size,
        layers=frozenset(range(int(number(config, "num_dense_layers", 1)), num_layers)),
        normalise=True,
        shared_intermediate_size=size * int(number(config, "num_shared_experts", 2)),
        shared_gate=False,
        scoring="sigmoid",
        correction=True,
        scale=number(config, "route_scale", 1.0),
    )
