"""Qwen, the first version: Llama with packed query, key and value with a bias, and names of its own.

Its scaling of attention and frequencies beyond `seq_length` changes nothing before it, and a sequence may grow no
further than that here.
"""

from services.engine.models.config_fields import Config, boolean, config_error, integer, llama_like, number
from services.engine.models.description import DecoderDescription
from services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("QWenLMHeadModel",)
layout = named_layout(
    Names(
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}",
        input_norm="ln_1",
        qkv=("attn.c_attn",),
        o="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.w2", "mlp.w1"),
        down="mlp.c_proj",
    )
)


def describe(config: Config) -> DecoderDescription:
    """`intermediate_size` counts gate and up together."""
    heads = integer(config, "num_attention_heads")
    fields = {
        **config,
        "head_dim": integer(config, "kv_channels", integer(config, "hidden_size") // heads),
        "num_key_value_heads": heads,
        "intermediate_size": integer(config, "intermediate_size") // 2,
        "rms_norm_eps": number(config, "layer_norm_epsilon", 1e-6),
        "rope_theta": number(config, "rotary_emb_base", 10_000.0),
        "partial_rotary_factor": number(config, "rotary_pct", 1.0),
        "max_position_embeddings": _context(config),
    }
    if not boolean(config, "no_bias", True):
        raise config_error("'no_bias': false is not supported.")
    return llama_like(fields, "qwen", qkv_bias=True)


def _context(config: Config) -> int:
    """The trained length where positions beyond it are scaled, else all that the config allows."""
    longest = integer(config, "max_position_embeddings", 8192)
    trained = integer(config, "seq_length", longest)
    stretches = boolean(config, "use_dynamic_ntk", False) or boolean(config, "use_logn_attn", False)
    return trained if stretches else longest
