"""GLM: Llama that turns the first half of each head in neighbouring pairs, with packed gate and up."""

from dataclasses import replace

from services.engine.models.config_fields import Config, boolean, integer, llama_like
from services.engine.models.description import DecoderDescription
from services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("GlmForCausalLM",)
layout = named_layout(Names(up=("mlp.gate_up_proj",)))


def describe(config: Config) -> DecoderDescription:
    """`attention_bias` is on query, key and value."""
    fields = {"partial_rotary_factor": 0.5, **config, "head_dim": integer(config, "head_dim", 128)}
    description = llama_like(fields, "glm", qkv_bias=boolean(config, "attention_bias", True))
    assert description.rope is not None
    return replace(description, rope=replace(description.rope, interleaved=True))
