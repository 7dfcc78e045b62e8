"""Qwen3 (dense): queries and keys normalised per head, its own head size, biases only if the config enables them."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, integer, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.families.qwen2 import qwen_windows
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("Qwen3ForCausalLM",)
ABOUT = About(tools=("hermes",), reasoning=("qwen3",))
layout = llama_layout

_HEAD_DIM = 128
"""Head size if the config has no `head_dim`."""


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    bias = boolean(config, "attention_bias", False)
    fields = {**config, "head_dim": integer(config, "head_dim", _HEAD_DIM)}
    return llama_like(fields, "qwen3", qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=qwen_windows(config))
