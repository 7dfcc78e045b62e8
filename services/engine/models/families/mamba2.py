"""Mamba 2, Codestral Mamba: a state space with one decay for each head in every layer, neither attention nor MLPs."""

from antiphon.services.engine.models.config_fields import Config, boolean, integer, llama_like, number
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.families.mamba import OUTER_NAMES
from antiphon.services.engine.models.layout import Names, named_layout
from antiphon.services.engine.models.recurrent_kinds import StateSpace
from antiphon.services.engine.models.state_spaces import checked, names_under, step_limits, without_attention

ARCHITECTURES = ("Mamba2ForCausalLM",)
layout = named_layout(Names(**names_under("mixer"), **OUTER_NAMES))


def describe(config: Config) -> DecoderDescription:
    """Returns the description."""
    layers, eps = frozenset(range(integer(config, "num_hidden_layers", 64))), number(config, "layer_norm_epsilon", 1e-5)
    recurrent = StateSpace(
        layers=layers,
        num_heads=integer(config, "num_heads", 128),
        head_dim=integer(config, "head_dim", 64),
        state_dim=integer(config, "state_size", 128),
        num_groups=integer(config, "n_groups", 8),
        kernel_size=integer(config, "conv_kernel", 4),
        norm_eps=eps,
        bias=boolean(config, "use_bias", False),
        conv_bias=boolean(config, "use_conv_bias", True),
        step_limits=step_limits(config),
    )
    fields = {**without_attention(config), "rms_norm_eps": eps}
    return llama_like(fields, "mamba2", rope=None, without_mlp=layers, recurrent=checked(recurrent))
