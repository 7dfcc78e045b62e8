"""Granite 4, dense and with experts: most layers have a state space (Mamba 2) in place of attention.

The factors are those of Granite 3. The MLP is called the shared one; with experts it is one of them, which every token
uses. Attention has no rotary embedding unless the config asks for one.
"""

from dataclasses import replace
from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, integer
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.families import granite, granite_moe
from antiphon.services.engine.models.layout import Names, Parameter, named_layout
from antiphon.services.engine.models.state_spaces import MAMBA_NAMES, listed_layers, state_space

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)
ABOUT = About(models="Granite 4, also with state spaces and experts")
_SHARED = "shared_mlp.input_linear"
_dense = named_layout(Names(**MAMBA_NAMES, up=(_SHARED,), down="shared_mlp.output_linear"))
_experts = named_layout(Names(**MAMBA_NAMES, **granite_moe.EXPERT_NAMES))
_split = named_layout(Names(**MAMBA_NAMES))
_SPLIT_FAMILY = "granite_hybrid_split"


def layout(description: DecoderDescription, /) -> tuple[Parameter, ...]:
    """Returns the parameters."""
    if description.family == _SPLIT_FAMILY:
        return _split(description)
    return (_dense if description.experts is None else _experts)(description)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `num_local_experts` is 0 in dense models.

    `split_projections`: whether gates, ups and experts are tensors of their own, with Llama's names (GGUF).
    """
    fields: dict[str, Any] = {**config, "num_hidden_layers": integer(config, "num_hidden_layers", 32)}
    has_experts = config.get("num_local_experts", 8) != 0
    if not has_experts:
        fields["intermediate_size"] = integer(config, "shared_intermediate_size", 1024)
    description = granite.describe(fields)
    if has_experts:
        description = replace(description, experts=granite_moe.experts({"shared_intermediate_size": 1024, **fields}))
    if config.get("position_embedding_type") != "rope":
        description = replace(description, rope=None)
    layers = listed_layers(fields, fields.get("layer_types") or fields.get("layers_block_type"))
    family = _SPLIT_FAMILY if boolean(config, "split_projections", False) else "granite_hybrid"
    return replace(description, family=family, recurrent=state_space(fields, layers) if layers else None)
