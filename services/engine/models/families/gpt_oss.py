"""gpt-oss: experts with biases and a clamped activation, attention with sinks, sliding windows in every other layer.

The checkpoint has all experts of a layer in one tensor, plain or in MXFP4. A token's experts are those with the highest
logits. Their weights are the softmax over these logits, which equals the softmax over all logits, divided by its sum
over the chosen experts.
"""

from antiphon.services.engine.kernels.swigluoai import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT
from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    boolean,
    config_error,
    integer,
    layer_windows,
    llama_like,
    number,
)
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("GptOssForCausalLM",)
ABOUT = About(tools=("gpt_oss",), reasoning=("gpt_oss",))
layout = named_layout(
    Names(router="mlp.router", stacked_up="mlp.experts.gate_up_proj", stacked_down="mlp.experts.down_proj")
)
_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0}
_HEAD_DIM, _WINDOW = 64, 128


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `intermediate_size` is the size of one expert."""
    for name, expected in (("swiglu_alpha", SWIGLUOAI_ALPHA), ("swiglu_limit", SWIGLUOAI_LIMIT)):
        if number(config, name, expected) != expected:
            raise config_error(f"'{name}' must be {expected}, not {config[name]}.")
    num_layers = integer(config, "num_hidden_layers")
    kinds = config.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
    ]
    bias = boolean(config, "attention_bias", True)
    experts = Experts(
        num_experts=integer(config, "num_local_experts", config.get("num_experts")),
        num_per_token=integer(config, "num_experts_per_tok", config.get("experts_per_token")),
        intermediate_size=integer(config, "intermediate_size"),
        layers=frozenset(range(num_layers)),
        normalise=True,
        router_bias=True,
        bias=True,
    )
    fields = {**_DEFAULTS, **config, "head_dim": integer(config, "head_dim", _HEAD_DIM)}
    return llama_like(
        fields,
        "gpt_oss",
        activation="swigluoai",
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
        experts=experts,
        sliding_windows=layer_windows({**config, "layer_types": kinds}, integer(config, "sliding_window", _WINDOW)),
    )
