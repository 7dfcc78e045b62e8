"""EXAONE 4: norms after attention and MLP instead of before them, and a norm of each query head and key head.

The larger model has sliding windows in three of four layers, and no rotary embedding in the others.
"""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, integer, layer_windows, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("Exaone4ForCausalLM",)
ABOUT = About(tools=("hermes",), reasoning=("qwen3",))
layout = named_layout(
    Names(after_attention_norm="post_attention_layernorm", after_mlp_norm="post_feedforward_layernorm")
)
_PATTERN, _EPS = 4, 1e-5


def describe(config: Config) -> DecoderDescription:
    """Returns the description. A null `sliding_window` means full attention and rotary embedding in every layer."""
    num_layers = integer(config, "num_hidden_layers")
    windows: tuple[int | None, ...] = (None,) * num_layers
    unrotated = frozenset[int]()
    if config.get("sliding_window") is not None:
        kinds = config.get("layer_types") or _kinds(config, num_layers)
        windows = layer_windows({**config, "layer_types": kinds}, integer(config, "sliding_window"))
        unrotated = frozenset(layer for layer, window in enumerate(windows) if window is None)
    return llama_like(
        {"rms_norm_eps": _EPS, **config},
        "exaone4",
        residual="post_normed",
        qk_norm=True,
        sliding_windows=windows,
        unrotated_layers=unrotated,
    )


def _kinds(config: Config, num_layers: int) -> list[str]:
    """Returns the kinds of layers for a pattern, which is a number or letters such as `LLLG`."""
    pattern = config.get("sliding_window_pattern") or _PATTERN
    every = len(pattern) if isinstance(pattern, str) else int(pattern)
    return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(num_layers)]
