"""Mistral: Llama without biases; the first versions have a sliding window in every layer, Ministral in some."""

from antiphon.services.engine.models.config_fields import Config, integer, layer_windows, llama_like, sliding_window
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("MistralForCausalLM", "MinistralForCausalLM")
layout = llama_layout


def describe(config: Config) -> DecoderDescription:
    """Returns the description. A missing or null `sliding_window` means full attention."""
    if config.get("layer_types") is None or config.get("sliding_window") is None:
        return llama_like(config, "mistral", sliding_windows=sliding_window(config))
    windows = layer_windows(config, integer(config, "sliding_window"))
    return llama_like(config, "mistral", sliding_windows=windows)
