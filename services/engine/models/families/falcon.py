"""Falcon: attention and MLP in parallel, layer norms, an MLP without gate, one key head or a few.

The first checkpoints have one norm for attention and MLP, and one key head (without `multi_query`, as many as query
heads).
The new decoder architecture has grouped key heads and two norms. Positions are encoded by rotation, or by ALiBi
(`alibi`).
"""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, activation, boolean, integer, llama_like, number
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, Parameter, named_layout

ARCHITECTURES = ("FalconForCausalLM",)
ABOUT = About(limits="position biases are exact, while the original rounds them to bfloat16")


def layout(description: DecoderDescription) -> tuple[Parameter, ...]:
    """Returns the layout. Two parallel norms have other names.

    With a single key head, the grouped row order is the same as all queries, the key, the value.
    """
    two_norms = description.residual == "parallel" and not description.shared_norm
    names = Names(
        embedding="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}",
        input_norm="ln_attn" if two_norms else "input_layernorm",
        qkv=("self_attention.query_key_value",),
        o="self_attention.dense",
        mlp_norm="ln_mlp" if two_norms else "post_attention_layernorm",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        grouped_qkv=True,
    )
    return named_layout(names)(description)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Falcon scales scores after adding ALiBi, so `alibi_scale` contains the same factor."""
    hidden_size, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    grouped = boolean(config, "new_decoder_architecture", False)
    parallel = grouped or boolean(config, "parallel_attn", True)
    two_norms = grouped and integer(config, "num_ln_in_parallel_attn", 2) == 2
    bias, alibi = boolean(config, "bias", False), boolean(config, "alibi", False)
    fields = {
        "tie_word_embeddings": True,
        **config,
        "num_key_value_heads": _kv_heads(config, heads, grouped),
        "intermediate_size": integer(config, "ffn_hidden_size", 4 * hidden_size),
    }
    rope = {"rope": None, "alibi_scale": (hidden_size // heads) ** -0.5} if alibi else {}
    return llama_like(
        fields,
        "falcon",
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "activation", "gelu"),
        gated_mlp=False,
        residual="parallel" if parallel else "sequential",
        shared_norm=parallel and not two_norms,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        **rope,
    )


def _kv_heads(config: Config, heads: int, grouped: bool) -> int:
    """Returns the number of key heads. `num_kv_heads` applies only to the new architecture."""
    if grouped:
        return integer(config, "num_kv_heads", heads)
    return 1 if boolean(config, "multi_query", True) else heads
