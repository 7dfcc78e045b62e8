"""OLMoE and FlexOlmo: experts in every layer, chosen by a softmax; one norm for all query heads, one for all keys.

OLMoE has norms before attention and experts; FlexOlmo has them after both, as OLMo 2 has.
"""

from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    config_error,
    integer,
    llama_like,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.families import olmo2
from antiphon.services.engine.models.layout import Parameter, llama_layout

_FLEX = "FlexOlmoForCausalLM"
ARCHITECTURES = ("OlmoeForCausalLM", _FLEX)
_LIMITS = "no `clip_qkv`"
ABOUT = {"OlmoeForCausalLM": About(models="OLMoE", limits=_LIMITS), _FLEX: About(models="FlexOlmo", limits=_LIMITS)}
_FLEX_DEFAULTS: dict[str, Any] = {"rope_theta": 500_000.0}


def layout(description: DecoderDescription, /) -> tuple[Parameter, ...]:
    """Returns the parameters; the names of the norms follow their places."""
    return (olmo2.layout if description.residual == "post_normed" else llama_layout)(description)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `intermediate_size` is the size of one expert."""
    if config.get("clip_qkv") is not None:
        raise config_error("'clip_qkv' is not supported.")
    flex = bool({_FLEX, "FlexOlmoModel"}.intersection(config["architectures"]))
    bias = boolean(config, "attention_bias", False)
    details: dict[str, Any] = {"residual": "post_normed"} if flex else {}
    experts = Experts(
        num_experts=integer(config, "num_experts", config.get("num_local_experts")),
        num_per_token=integer(config, "num_experts_per_tok", 5 if flex else 8),
        intermediate_size=integer(config, "intermediate_size"),
        layers=frozenset(range(integer(config, "num_hidden_layers"))),
        normalise=boolean(config, "norm_topk_prob", False),
    )
    return llama_like(
        {**_FLEX_DEFAULTS, **config} if flex else {"rms_norm_eps": 1e-5, **config},
        "olmoe",
        qk_norm=True,
        whole_qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        experts=experts,
        **details,
    )
