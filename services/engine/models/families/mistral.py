"""Mistral: Llama without biases; the first versions have a sliding window in every layer."""

from services.engine.models.config_fields import Config, llama_like, sliding_window
from services.engine.models.description import DecoderDescription
from services.engine.models.layout import llama_layout

ARCHITECTURES = ("MistralForCausalLM",)
layout = llama_layout


def describe(config: Config) -> DecoderDescription:
    """Returns the description. A missing or null `sliding_window` means full attention."""
    return llama_like(config, "mistral", sliding_windows=sliding_window(config))
