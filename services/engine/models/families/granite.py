"""Granite 3 (dense): Llama with factors on embeddings, scores, the outputs of each layer's parts, and logits.

With a factor r on these outputs, h + r f(norm(h)), the residual stream divided by r is that of a decoder without the
factor. So the embeddings are divided by r, and the eps of the norms by r²; norms are otherwise independent of the
scale.
"""

from dataclasses import replace

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, config_error, llama_like, number
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("GraniteForCausalLM",)
ABOUT = About(reasoning=("granite",))
layout = llama_layout


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    bias = boolean(config, "attention_bias", False)
    factor, divisor = number(config, "residual_multiplier", 1.0), number(config, "logits_scaling", 1.0)
    for name, value in (("residual_multiplier", factor), ("logits_scaling", divisor)):
        if value <= 0.0:
            raise config_error(f"'{name}' must be above 0, not {value:g}.")
    description = llama_like(
        config,
        "granite",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=boolean(config, "mlp_bias", False),
        query_scale=number(config, "attention_multiplier", 1.0),
        logits_scale=1.0 / divisor,
        embedding_scale=number(config, "embedding_multiplier", 1.0) / factor,
        rounded_embedding_scale=False,
    )
    return replace(description, norm_eps=description.norm_eps / factor**2)
