"""Baichuan 1 and 2: Llama with packed query, key and value; the 13B models bias scores instead of turning positions.

The second version divides the rows of its output projection by their length.
"""

from services.engine.models.config_fields import Config, integer, llama_like
from services.engine.models.description import DecoderDescription
from services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("BaiChuanForCausalLM", "BaichuanForCausalLM")
layout = named_layout(Names(qkv=("self_attn.W_pack",)))

_SECOND_VOCAB_SIZE = 125_696


def describe(config: Config) -> DecoderDescription:
    """A model with turning positions has `max_position_embeddings`, one with biases only `model_max_length`."""
    second = config.get("vocab_size") == _SECOND_VOCAB_SIZE or "z_loss_weight" in config
    if config.get("max_position_embeddings") is not None:
        return llama_like(config, "baichuan", normalised_head=second)
    fields = {**config, "max_position_embeddings": integer(config, "model_max_length")}
    return llama_like(fields, "baichuan", rope=None, alibi_scale=1.0, normalised_head=second)
