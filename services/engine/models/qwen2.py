"""Qwen2 and Qwen2.5: Llama with biases on query, key and value; a window only where the config turns it on."""

from services.engine.models.config_fields import Config, boolean, integer, layer_windows, llama_like
from services.engine.models.description import DecoderDescription
from services.engine.models.layout import llama_layout

ARCHITECTURES = ("Qwen2ForCausalLM",)
layout = llama_layout


def describe(config: Config) -> DecoderDescription:
    """The query, key and value biases are always there; no other projection has one."""
    return llama_like(config, "qwen2", qkv_bias=True, sliding_windows=qwen_windows(config))


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Qwen's configs name a `sliding_window` even where `use_sliding_window` says that there is none."""
    on = boolean(config, "use_sliding_window", False) and config.get("sliding_window") is not None
    return layer_windows(config, integer(config, "sliding_window") if on else None)
