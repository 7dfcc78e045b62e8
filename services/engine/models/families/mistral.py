"""Mistral, Ministral and Ministral 3: Llama without biases.

The first versions have a sliding window in every layer, Ministral in some. Ministral 3 scales positions with yarn, and
multiplies queries by a factor that grows with the position.
"""

from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    integer,
    layer_windows,
    llama_like,
    number,
    sliding_window,
)
from antiphon.services.engine.models.description import DecoderDescription, QueryGrowth
from antiphon.services.engine.models.layout import llama_layout

_THIRD = "Ministral3ForCausalLM"
ARCHITECTURES = ("MistralForCausalLM", "MinistralForCausalLM", _THIRD)
ABOUT = {
    "MistralForCausalLM": About(models="Mistral", tools=("mistral",), reasoning=("mistral",)),
    "MinistralForCausalLM": About(models="Ministral", tools=("mistral",)),
    _THIRD: About(models="Ministral 3", tools=("mistral",), reasoning=("mistral",)),
}
layout = llama_layout
_THIRD_DEFAULTS: dict[str, Any] = {"head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144}


def describe(config: Config) -> DecoderDescription:
    """Returns the description. A missing or null `sliding_window` means full attention."""
    details: dict[str, Any] = {}
    if {_THIRD, "Ministral3Model"}.intersection(config.get("architectures") or ()):
        details["query_growth"] = query_growth(config)
        config = {**_THIRD_DEFAULTS, **config}
    if config.get("layer_types") is None or config.get("sliding_window") is None:
        return llama_like(config, "mistral", sliding_windows=sliding_window(config), **details)
    windows = layer_windows(config, integer(config, "sliding_window"))
    return llama_like(config, "mistral", sliding_windows=windows, **details)


def query_growth(config: Config) -> QueryGrowth | None:
    """Returns the growth of queries with the position; None if the config has none."""
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rate = number(scaling, "llama_4_scaling_beta", 0.0)
    return QueryGrowth(rate, integer(scaling, "original_max_position_embeddings")) if rate else None
