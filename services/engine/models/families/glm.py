"""GLM 4 (2024 and 2025): Llama that rotates the first half of each head in pairs of neighbours; fused gate and up.

GLM 4 of 2025 (`Glm4ForCausalLM`) also normalises the outputs of attention and MLP.
"""

from antiphon.services.engine.models.config_fields import Config, boolean, integer, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, Parameter, named_layout

ARCHITECTURES = ("GlmForCausalLM", "Glm4ForCausalLM")
_UP = ("mlp.gate_up_proj",)
_PLAIN = named_layout(Names(up=_UP))
_NORMED = named_layout(
    Names(up=_UP, after_attention_norm="post_self_attn_layernorm", after_mlp_norm="post_mlp_layernorm")
)


def layout(description: DecoderDescription) -> tuple[Parameter, ...]:
    """Returns the layout, in the version with further norms if the description has them."""
    return (_NORMED if description.residual == "normed" else _PLAIN)(description)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to query, key and value."""
    fields = {"partial_rotary_factor": 0.5, **config, "head_dim": integer(config, "head_dim", 128)}
    normed = "Glm4ForCausalLM" in config["architectures"] or "Glm4Model" in config["architectures"]
    return llama_like(
        fields,
        "glm",
        interleaved=True,
        qkv_bias=boolean(config, "attention_bias", True),
        residual="normed" if normed else "sequential",
    )
