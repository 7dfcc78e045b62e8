"""Qwen, the first version: Llama with a fused query-key-value projection that has a bias, and other tensor names.

Scaling of attention and frequencies applies only beyond `seq_length`. If the config enables it, sequences are limited
to `seq_length`, so it has no effect here.
"""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, config_error, integer, llama_like, number
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("QWenLMHeadModel",)
ABOUT = About(limits="with `use_dynamic_ntk` or `use_logn_attn`: contexts up to `seq_length`")
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
    """Returns the description. The config's `intermediate_size` is gate and up together."""
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
    """Returns `seq_length` if the config scales positions beyond it, else `max_position_embeddings`."""
    longest = integer(config, "max_position_embeddings", 8192)
    trained = integer(config, "seq_length", longest)
    stretches = boolean(config, "use_dynamic_ntk", False) or boolean(config, "use_logn_attn", False)
    return trained if stretches else longest
