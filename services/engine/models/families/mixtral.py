"""Mixtral: Mistral with a mixture of experts in every layer; the weights of the chosen experts sum to one."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, integer, llama_like, sliding_window
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("MixtralForCausalLM",)
ABOUT = About(tools=("mistral",))
layout = named_layout(
    Names(
        router="block_sparse_moe.gate",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `intermediate_size` is the size of one expert."""
    experts = Experts(
        num_experts=integer(config, "num_local_experts", 8),
        num_per_token=integer(config, "num_experts_per_tok", 2),
        intermediate_size=integer(config, "intermediate_size"),
        layers=frozenset(range(integer(config, "num_hidden_layers"))),
        normalise=True,
    )
    fields = {"rms_norm_eps": 1e-5, **config}
    return llama_like(fields, "mixtral", experts=experts, sliding_windows=sliding_window(config))
