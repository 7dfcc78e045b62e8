"""Seed-OSS: Llama with its own head size, and biases on query, key and value."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, integer, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("SeedOssForCausalLM",)
ABOUT = About(tools=("seed_oss",), reasoning=("seed_oss",))
layout = llama_layout

_HEAD_DIM = 128
"""Head size if the config has no `head_dim`."""


def describe(config: Config) -> DecoderDescription:
    """Returns the description. The bias of the output projection has a field of its own."""
    fields = {**config, "head_dim": integer(config, "head_dim", _HEAD_DIM)}
    return llama_like(
        fields,
        "seed_oss",
        qkv_bias=boolean(config, "attention_bias", True),
        o_bias=boolean(config, "attention_out_bias", False),
        mlp_bias=boolean(config, "mlp_bias", False),
    )
