"""Bamba: most layers have a state space (Mamba 2) in place of attention, which rotates half of each head."""

from typing import Any

from antiphon.services.engine.models.config_fields import Config, boolean, config_error, integer, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout
from antiphon.services.engine.models.state_spaces import FEED_FORWARD_NAMES, MAMBA_NAMES, state_space

ARCHITECTURES = ("BambaForCausalLM",)
layout = named_layout(Names(**MAMBA_NAMES, **FEED_FORWARD_NAMES))
_DEFAULTS: dict[str, Any] = {"partial_rotary_factor": 0.5, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5}


def describe(config: Config) -> DecoderDescription:
    """Returns the description."""
    fields: dict[str, Any] = {"num_key_value_heads": 8, **_DEFAULTS, **config}
    attending = frozenset(config.get("attn_layer_indices") or ())
    layers = frozenset(range(integer(config, "num_hidden_layers", 32)))
    if not attending & layers or layers <= attending:
        raise config_error("'attn_layer_indices' must list layers, but not all of them.")
    bias = boolean(config, "attention_bias", False)
    return llama_like(
        fields,
        "bamba",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=boolean(config, "mlp_bias", False),
        recurrent=state_space(fields, layers - attending),
    )
