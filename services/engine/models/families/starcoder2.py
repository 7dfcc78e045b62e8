"""StarCoder2: Mistral with layer norms, an MLP without gate, biases, tied embeddings."""

from antiphon.services.engine.models.config_fields import (
    Config,
    activation,
    boolean,
    llama_like,
    number,
    sliding_window,
)
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("Starcoder2ForCausalLM",)
layout = named_layout(Names(up=("mlp.c_fc",), down="mlp.c_proj"))


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `use_bias` applies to every projection."""
    bias = boolean(config, "use_bias", True)
    return llama_like(
        {"tie_word_embeddings": True, **config},
        "starcoder2",
        sliding_windows=sliding_window(config),
        norm="layer",
        norm_eps=number(config, "norm_epsilon", 1e-5),
        activation=activation(config, default="gelu_pytorch_tanh"),
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )
