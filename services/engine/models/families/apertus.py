"""Apertus: Llama with norms of queries and keys per head; an MLP without gate, whose activation has learned numbers."""

from antiphon.services.engine.models.config_fields import Config, activation, boolean, llama_like
from antiphon.services.engine.models.description import ActivationKind, DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("ApertusForCausalLM",)
layout = named_layout(Names(input_norm="attention_layernorm", mlp_norm="feedforward_layernorm", up=("mlp.up_proj",)))
_XIELU = "xielu"


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    bias = boolean(config, "attention_bias", False)
    named = (config.get("hidden_act") or _XIELU) == _XIELU
    kind: ActivationKind = "xielu" if named else activation(config)
    return llama_like(
        {"rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0, **config},
        "apertus",
        activation=kind,
        gated_mlp=False,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )
