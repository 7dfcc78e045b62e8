"""Baichuan 1 and 2: Llama with a fused query-key-value projection; the 13B models use ALiBi instead of rotation.

The second version normalises the rows of its output projection to length one.
"""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, integer, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("BaiChuanForCausalLM", "BaichuanForCausalLM")
ABOUT = About(
    limits="13B is recognised by a config without `max_position_embeddings`, "
    "version 2 by its vocabulary or `z_loss_weight`"
)
layout = named_layout(Names(qkv=("self_attn.W_pack",)))

_SECOND_VOCAB_SIZE = 125_696


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Rotary models have `max_position_embeddings`, ALiBi models only `model_max_length`."""
    second = config.get("vocab_size") == _SECOND_VOCAB_SIZE or "z_loss_weight" in config
    if config.get("max_position_embeddings") is not None:
        return llama_like(config, "baichuan", normalised_head=second)
    fields = {**config, "max_position_embeddings": integer(config, "model_max_length")}
    return llama_like(fields, "baichuan", rope=None, alibi_scale=1.0, normalised_head=second)
