"""Qwen3 (dense): queries and keys normalised per head, a head size of its own, no bias unless the config asks."""

from services.engine.models.config_fields import Config, boolean, integer, llama_like
from services.engine.models.description import DecoderDescription
from services.engine.models.layout import llama_layout
from services.engine.models.qwen2 import qwen_windows

ARCHITECTURES = ("Qwen3ForCausalLM",)
layout = llama_layout

_HEAD_DIM = 128
"""What a config without `head_dim` means."""


def describe(config: Config) -> DecoderDescription:
    """`attention_bias` is on all four projections of the attention."""
    bias = boolean(config, "attention_bias", False)
    fields = {**config, "head_dim": integer(config, "head_dim", _HEAD_DIM)}
    return llama_like(fields, "qwen3", qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=qwen_windows(config))
