"""Granite 3 with experts: the dense Granite 3 with a mixture of experts in every layer, and an optional shared one.

The checkpoint has all experts of a layer in one tensor. A token's experts are those with the highest logits, weighted
by the softmax over these.
"""

from dataclasses import replace
from typing import Any

from antiphon.services.engine.models.config_fields import Config, integer
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.families import granite
from antiphon.services.engine.models.layout import Names, named_layout

_SHARED = "GraniteMoeSharedForCausalLM"
ARCHITECTURES = ("GraniteMoeForCausalLM", _SHARED)
EXPERT_NAMES: dict[str, Any] = {
    "router": "block_sparse_moe.router.layer",
    "stacked_up": "block_sparse_moe.input_linear.weight",
    "stacked_down": "block_sparse_moe.output_linear.weight",
    "stacked_rows": True,
    "shared_up": ("shared_mlp.input_linear",),
    "shared_down": "shared_mlp.output_linear",
}
layout = named_layout(Names(**EXPERT_NAMES))


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Only one of the architectures has a shared expert."""
    shared = bool({_SHARED, "GraniteMoeSharedModel"}.intersection(config["architectures"]))
    fields = config if shared else {**config, "shared_intermediate_size": 0}
    return replace(granite.describe(config), family="granite_moe", experts=experts(fields))


def experts(config: Config) -> Experts:
    """Returns the experts. `intermediate_size` is the size of one expert."""
    size = config.get("shared_intermediate_size")
    return Experts(
        num_experts=integer(config, "num_local_experts", 8),
        num_per_token=integer(config, "num_experts_per_tok", 2),
        intermediate_size=integer(config, "intermediate_size"),
        layers=frozenset(range(integer(config, "num_hidden_layers"))),
        normalise=True,
        shared_intermediate_size=integer(config, "shared_intermediate_size") if size else 0,
        shared_gate=False,
    )
