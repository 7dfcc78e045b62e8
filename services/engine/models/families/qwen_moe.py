"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts in some layers; Qwen2-MoE has a gated shared expert too."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, config_error, integer, llama_like
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.families.qwen2 import qwen_windows
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
ABOUT = {
    "Qwen2MoeForCausalLM": About(models="Qwen2-MoE"),
    "Qwen3MoeForCausalLM": About(models="Qwen3-MoE", tools=("hermes", "qwen3_coder"), reasoning=("qwen3",)),
}
layout = llama_layout


def describe(config: Config) -> DecoderDescription:
    """Returns the description. The architecture's name distinguishes the two versions."""
    if "Qwen3MoeForCausalLM" in config["architectures"]:
        bias = boolean(config, "attention_bias", False)
        details = {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "experts": _experts(config, 0)}
    else:
        shared = integer(config, "shared_expert_intermediate_size")
        details = {"qkv_bias": boolean(config, "qkv_bias", True), "experts": _experts(config, shared)}
    return llama_like(config, "qwen_moe", sliding_windows=qwen_windows(config), **details)


def _experts(config: Config, shared_intermediate_size: int) -> Experts:
    """Returns the experts. Every `decoder_sparse_step`-th layer has them, except those in `mlp_only_layers`."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config_error("'mlp_only_layers' must list layers.")
    step = integer(config, "decoder_sparse_step", 1)
    sparse = (layer for layer in range(integer(config, "num_hidden_layers")) if (layer + 1) % step == 0)
    return Experts(
        num_experts=integer(config, "num_experts", config.get("num_local_experts")),
        num_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        layers=frozenset(sparse) - frozenset(dense),
        normalise=boolean(config, "norm_topk_prob", False),
        shared_intermediate_size=shared_intermediate_size,
    )
