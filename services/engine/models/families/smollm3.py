"""SmolLM 3: Llama whose every fourth layer has no rotary embedding; sliding windows in those layers if enabled."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    integer,
    layer_windows,
    llama_like,
    unrotated_layers,
)
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("SmolLM3ForCausalLM",)
ABOUT = About(tools=("hermes",), reasoning=("qwen3",))
layout = llama_layout

_DEFAULTS = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    bias, unrotated = boolean(config, "attention_bias", False), unrotated_layers(config)
    return llama_like(
        {**_DEFAULTS, **config},
        "smollm3",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=boolean(config, "mlp_bias", False),
        unrotated_layers=unrotated,
        sliding_windows=_windows(config, unrotated),
    )


def _windows(config: Config, unrotated: frozenset[int]) -> tuple[int | None, ...]:
    num_layers = integer(config, "num_hidden_layers")
    if not boolean(config, "use_sliding_window", False) or config.get("sliding_window") is None:
        return (None,) * num_layers
    kinds = ["sliding_attention" if layer in unrotated else "full_attention" for layer in range(num_layers)]
    listed = config.get("layer_types") or kinds
    return layer_windows({**config, "layer_types": listed}, integer(config, "sliding_window"))
