"""Mamba 1 and Falcon Mamba: a state space with decays for each channel in every layer, neither attention nor MLPs.

Falcon Mamba norms what the step, B and C are made of.
"""

from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, integer, llama_like, number
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout
from antiphon.services.engine.models.state_spaces import channel_names_under, channel_space, without_attention

ARCHITECTURES = ("MambaForCausalLM", "FalconMambaForCausalLM")
ABOUT = {"MambaForCausalLM": About(models="Mamba 1"), "FalconMambaForCausalLM": About(models="Falcon Mamba")}
OUTER_NAMES: dict[str, Any] = {
    "embedding": "backbone.embeddings",
    "final_norm": "backbone.norm_f",
    "layer": "backbone.layers.{}",
    "input_norm": "norm",
}
layout = named_layout(Names(**channel_names_under("mixer"), **OUTER_NAMES))


def describe(config: Config) -> DecoderDescription:
    """Returns the description."""
    falcon = any(name.startswith("FalconMamba") for name in config["architectures"])
    layers = frozenset(range(integer(config, "num_hidden_layers", 32)))
    expanded = integer(config, "expand", 2) * integer(config, "hidden_size")
    fields = {
        **without_attention(config),
        "rms_norm_eps": number(config, "layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    return llama_like(
        fields,
        "mamba",
        rope=None,
        without_mlp=layers,
        recurrent=channel_space(
            config,
            layers,
            channels=integer(config, "intermediate_size", expanded),
            state_dim=integer(config, "state_size", 16),
            step_rank=config.get("time_step_rank", "auto"),
            kernel_size=integer(config, "conv_kernel", 4),
            biases=("use_bias", "use_conv_bias"),
            part_norms="plain" if falcon else "none",
            norm_eps=number(config, "mixer_rms_eps", 1e-6),
        ),
    )
