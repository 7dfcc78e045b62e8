"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and a sliding window only if the config enables it."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, integer, layer_windows, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("Qwen2ForCausalLM",)
ABOUT = About(tools=("hermes",), reasoning=("qwen3",))
layout = llama_layout


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Query, key and value always have biases; no other projection has one."""
    return llama_like(config, "qwen2", qkv_bias=True, sliding_windows=qwen_windows(config))


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Returns each layer's window. Configs contain `sliding_window` even if `use_sliding_window` turns it off."""
    on = boolean(config, "use_sliding_window", False) and config.get("sliding_window") is not None
    return layer_windows(config, integer(config, "sliding_window") if on else None)
