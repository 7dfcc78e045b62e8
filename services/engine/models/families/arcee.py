"""Arcee (AFM): Llama with an MLP without gate, whose activation is the square of ReLU."""

from antiphon.services.engine.models.config_fields import Config, activation, boolean, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("ArceeForCausalLM",)
layout = named_layout(Names(up=("mlp.up_proj",)))


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    bias = boolean(config, "attention_bias", False)
    return llama_like(
        {"rms_norm_eps": 1e-5, **config},
        "arcee",
        activation=activation(config, default="relu2"),
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=boolean(config, "mlp_bias", False),
    )
