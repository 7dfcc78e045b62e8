"""GPT-NeoX (Pythia): parallel residual, layer norms, rotation of a part of each head, an MLP without gate, biases."""

from antiphon.services.engine.models.config_fields import Config, activation, boolean, integer, llama_like, number
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("GPTNeoXForCausalLM",)
layout = named_layout(
    Names(
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        layer="gpt_neox.layers.{}",
        qkv=("attention.query_key_value",),
        o="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        grouped_qkv=True,
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Older configs have `rotary_pct` and `rotary_emb_base`."""
    bias = boolean(config, "attention_bias", True)
    parallel = boolean(config, "use_parallel_residual", True)
    fields = {
        "partial_rotary_factor": number(config, "rotary_pct", 0.25),
        "rope_theta": number(config, "rotary_emb_base", 10_000.0),
        **config,
        "num_key_value_heads": integer(config, "num_attention_heads"),
    }
    return llama_like(
        fields,
        "gpt_neox",
        norm="layer",
        norm_eps=number(config, "layer_norm_eps", 1e-5),
        activation=activation(config, default="gelu"),
        gated_mlp=False,
        residual="parallel" if parallel else "sequential",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
    )
