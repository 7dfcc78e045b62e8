"""GPT-2: learned positions, layer norms, an MLP without gate, matrices stored as [in, out], tied embeddings."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, activation, integer, llama_like, number, refuse_unless
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("GPT2LMHeadModel",)
ABOUT = About(limits="only the usual scaling of scores")
layout = named_layout(
    Names(
        embedding="transformer.wte",
        positions="transformer.wpe",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}",
        input_norm="ln_1",
        qkv=("attn.c_attn",),
        o="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        transposed=True,
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. GPT-2 configs have their own field names for every size."""
    refuse_unless(config, "scale_attn_weights", True)
    refuse_unless(config, "scale_attn_by_inverse_layer_idx", False)
    refuse_unless(config, "add_cross_attention", False)
    heads = integer(config, "n_head", 12)
    hidden_size, positions = integer(config, "n_embd", 768), integer(config, "n_positions", 1024)
    fields = {
        "tie_word_embeddings": True,
        **config,
        "hidden_size": hidden_size,
        "num_hidden_layers": integer(config, "n_layer", 12),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": integer(config, "n_inner", 4 * hidden_size),
        "max_position_embeddings": positions,
    }
    return llama_like(
        fields,
        "gpt2",
        rope=None,
        num_learned_positions=positions,
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
