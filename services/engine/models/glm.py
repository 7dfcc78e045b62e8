"""GLM: Llama that rotates the first half of each head in interleaved pairs, with a fused gate-up projection."""

from dataclasses import replace

from services.engine.models.config_fields import Config, boolean, integer, llama_like
from services.engine.models.description import DecoderDescription
from services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("GlmForCausalLM",)
layout = named_layout(Names(up=("mlp.gate_up_proj",)))


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to query, key and value."""
    fields = {"partial_rotary_factor": 0.5, **config, "head_dim": integer(config, "head_dim", 128)}
    description = llama_like(fields, "glm", qkv_bias=boolean(config, "attention_bias", True))
    assert description.rope is not None
    return replace(description, rope=replace(description.rope, interleaved=True))
