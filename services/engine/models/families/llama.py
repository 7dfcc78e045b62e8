"""Llama 1 to 3: grouped-query attention, gated MLP, rotary positions with every scaling kind, optional biases."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("LlamaForCausalLM",)
ABOUT = About(tools=("llama3_json", "pythonic"))
layout = llama_layout


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Llama's `attention_bias` applies to all four projections of the attention."""
    bias = boolean(config, "attention_bias", False)
    mlp_bias = boolean(config, "mlp_bias", False)
    return llama_like(config, "llama", qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
