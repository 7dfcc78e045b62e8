"""ChatGLM 2, 3 and GLM-4 in the first format: few key heads, half of each head rotated in interleaved pairs.

`glm.py` handles the later GLM checkpoints.
"""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, integer, llama_like, number, refuse_unless
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
ABOUT = About(limits="RMS norm and `multi_query_attention` only")
layout = named_layout(
    Names(
        embedding="transformer.embedding.word_embeddings",
        final_norm="transformer.encoder.final_layernorm",
        head="transformer.output_layer",
        layer="transformer.encoder.layers.{}",
        qkv=("self_attention.query_key_value",),
        o="self_attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `rope_ratio` multiplies the rotary base for longer contexts."""
    refuse_unless(config, "rmsnorm", True)
    refuse_unless(config, "post_layer_norm", True)
    refuse_unless(config, "multi_query_attention", True)
    refuse_unless(config, "apply_residual_connection_post_layernorm", False)
    heads, bias = integer(config, "num_attention_heads"), boolean(config, "add_bias_linear", False)
    fields = {
        **config,
        "vocab_size": integer(config, "padded_vocab_size"),
        "num_hidden_layers": integer(config, "num_layers"),
        "num_key_value_heads": integer(config, "multi_query_group_num", 1),
        "head_dim": integer(config, "kv_channels", integer(config, "hidden_size") // heads),
        "intermediate_size": integer(config, "ffn_hidden_size"),
        "rms_norm_eps": number(config, "layernorm_epsilon", 1e-5),
        "max_position_embeddings": integer(config, "seq_length"),
        "rope_theta": 10_000.0 * number(config, "rope_ratio", 1.0),
        "partial_rotary_factor": 0.5,
    }
    qkv_bias = bias or boolean(config, "add_qkv_bias", False)
    return llama_like(fields, "chatglm", interleaved=True, qkv_bias=qkv_bias, o_bias=bias, mlp_bias=bias)
