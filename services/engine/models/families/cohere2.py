"""Command R7B and Command A: attention and MLP read one layer norm without bias; logits are multiplied by a factor.

Heads are rotated in interleaved pairs, in the layers with a sliding window only.
"""

from antiphon.services.engine.models.config_fields import Config, boolean, integer, layer_windows, llama_like, number
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("Cohere2ForCausalLM",)
layout = llama_layout
_WINDOW, _PATTERN, _SCALE, _EPS = 4096, 4, 0.0625, 1e-5


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `attention_bias` applies to all four projections of the attention."""
    num_layers, bias = integer(config, "num_hidden_layers"), boolean(config, "attention_bias", False)
    every = integer(config, "sliding_window_pattern", _PATTERN)
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    windows = layer_windows(
        {**config, "layer_types": config.get("layer_types") or kinds}, integer(config, "sliding_window", _WINDOW)
    )
    heads = integer(config, "num_attention_heads")
    return llama_like(
        {"tie_word_embeddings": True, "head_dim": integer(config, "hidden_size") // heads, **config},
        "cohere2",
        interleaved=True,
        norm="layer",
        norm_bias=False,
        norm_eps=number(config, "layer_norm_eps", _EPS),
        residual="parallel",
        shared_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        logits_scale=number(config, "logit_scale", _SCALE),
        sliding_windows=windows,
        unrotated_layers=frozenset(layer for layer, window in enumerate(windows) if window is None),
    )
