"""GLM 4.5 and 4.6: experts after the first layers, chosen by corrected sigmoids, and a shared expert without gate.

dots.llm1 (`Dots1ForCausalLM`) is the same with full rotation and its own window. Attention is Llama's with rotary
embedding on half of each head, and optional norms per head.
"""

from typing import Any

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

ARCHITECTURES = ("Glm4MoeForCausalLM", "Dots1ForCausalLM")
ABOUT = {
    "Glm4MoeForCausalLM": About(
        models="GLM 4.5 to 4.7",
        tools=("glm45",),
        reasoning=("qwen3",),
        limits="`--use-mtp`: C++ and PyTorch",
    ),
    "Dots1ForCausalLM": About(models="dots.llm1"),
}
layout = named_layout(
    Names(
        shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to query, key and value of GLM, and to all four of dots."""
    bias = boolean(config, "attention_bias", False)
    glm = "Glm4MoeForCausalLM" in config["architectures"] or "Glm4MoeModel" in config["architectures"]
    if glm:
        fields = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **config}
        details: dict[str, Any] = {"qk_norm": boolean(config, "use_qk_norm", False)}
    else:
        fields = {**config}
        details = {"qk_norm": True, "o_bias": bias, "sliding_windows": _windows(config)}
    return llama_like(
        fields,
        "glm4_moe",
        qkv_bias=bias,
        experts=sigmoid_experts(config, normalise=glm),
        offers_draft_layer=bool(drafting_layers(config)),
        other_parts=drafting_layers(config),
        **details,
    )


def sigmoid_experts(config: Config, *, normalise: bool) -> Experts:
    """Returns experts that are chosen by corrected sigmoids within groups (arXiv 2412.19437), as DeepSeek V3 has them.

    The first `first_k_dense_replace` layers have none. `normalise`: the default of `norm_topk_prob`.
    """
    num_groups, chosen_groups = expert_groups(config)
    first, size = int(number(config, "first_k_dense_replace", 0)), integer(config, "moe_intermediate_size")
    return Experts(
        num_experts=integer(config, "n_routed_experts"),
        num_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=size,
        layers=frozenset(range(first, integer(config, "num_hidden_layers"))),
        normalise=boolean(config, "norm_topk_prob", normalise),
        shared_intermediate_size=size * int(number(config, "n_shared_experts", 0)),
        shared_gate=False,
        scoring="sigmoid",
        correction=True,
        num_groups=num_groups,
        num_chosen_groups=chosen_groups,
        scale=number(config, "routed_scaling_factor", 1.0),
    )


def expert_groups(config: Config) -> tuple[int, int]:
    """Returns how many groups of experts there are, and from how many of them a token's experts are chosen."""
    num_experts, num_groups = integer(config, "n_routed_experts"), integer(config, "n_group", 1)
    chosen_groups, per_token = integer(config, "topk_group", 1), integer(config, "num_experts_per_tok")
    if num_experts % num_groups or chosen_groups > num_groups:
        raise config_error(f"'n_group' ({num_groups}) must divide 'n_routed_experts', and be at least 'topk_group'.")
    if per_token > num_experts // num_groups * chosen_groups:
        raise config_error(f"'num_experts_per_tok' ({per_token}) is more than the chosen groups have.")
    return num_groups, chosen_groups


def drafting_layers(config: Config) -> tuple[str, ...]:
    """Returns the name prefixes of the layers at the end of checkpoints that predict further tokens."""
    first = integer(config, "num_hidden_layers")
    return tuple(f"model.layers.{first + i}." for i in range(int(number(config, "num_nextn_predict_layers", 0))))


def _windows(config: Config) -> tuple[int | None, ...]:
    """Returns each layer's window; without one in the config, no layer has a window."""
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    last = integer(config, "num_hidden_layers")
    return layer_windows({"max_window_layers": last, **config}, window)
