"""ERNIE 4.5 with experts: the dense ERNIE 4.5 with experts in some layers, chosen by a softmax with corrections."""

from dataclasses import replace

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, config_error, integer, number
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.families import ernie
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("Ernie4_5_MoeForCausalLM",)
ABOUT = About(limits="no biases")
layout = named_layout(
    Names(
        correction="mlp.moe_statics.e_score_correction_bias",
        correction_in_row=True,
        shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        shared_down="mlp.shared_experts.down_proj",
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Layers from `moe_layer_start_index` to `moe_layer_end_index` have experts."""
    if boolean(config, "use_bias", False):
        raise config_error("'use_bias': true is not supported for a model with experts.")
    num_layers, every = integer(config, "num_hidden_layers"), integer(config, "moe_layer_interval", 1)
    first, last = (int(number(config, f"moe_layer_{end}_index", at)) for end, at in (("start", 1), ("end", -1)))
    between = range(first, (num_layers - 1 if last < 0 else last) + 1)
    size = integer(config, "moe_intermediate_size")
    experts = Experts(
        num_experts=integer(config, "moe_num_experts", 64),
        num_per_token=integer(config, "moe_k", 6),
        intermediate_size=size,
        layers=frozenset(layer for layer in between if layer < num_layers and (layer + 1) % every == 0),
        normalise=True,
        shared_intermediate_size=size * int(number(config, "moe_num_shared_experts", 2)),
        shared_gate=False,
        correction=True,
    )
    return replace(ernie.describe(config), family="ernie_moe", experts=experts)
