"""OPT: learned positions that start at row 2, layer norms, a ReLU MLP without gate, biases, tied embeddings.

The 350m checkpoint has another architecture (norms after each part, narrower embeddings) and is rejected.
"""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import (
    Config,
    activation,
    boolean,
    config_error,
    integer,
    llama_like,
    refuse_unless,
)
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("OPTForCausalLM",)
ABOUT = About(limits="not 350m (norms after each part, narrow embeddings)")
layout = named_layout(
    Names(
        embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{}",
        input_norm="self_attn_layer_norm",
        o="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up=("fc1",),
        down="fc2",
    )
)

_POSITION_OFFSET = 2


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Rejects options that only the 350m checkpoint or fine-tunes of the first release use."""
    hidden_size, positions = integer(config, "hidden_size"), integer(config, "max_position_embeddings", 2048)
    if integer(config, "word_embed_proj_dim", hidden_size) != hidden_size:
        raise config_error("'word_embed_proj_dim' other than 'hidden_size' is not supported.")
    refuse_unless(config, "do_layer_norm_before", True)
    refuse_unless(config, "_remove_final_layer_norm", False)
    refuse_unless(config, "layer_norm_elementwise_affine", True)
    bias = boolean(config, "enable_bias", True)
    fields = {
        "tie_word_embeddings": True,
        **config,
        "num_key_value_heads": integer(config, "num_attention_heads"),
        "intermediate_size": integer(config, "ffn_dim"),
    }
    return llama_like(
        fields,
        "opt",
        rope=None,
        num_learned_positions=positions + _POSITION_OFFSET,
        learned_position_offset=_POSITION_OFFSET,
        norm="layer",
        norm_eps=1e-5,
        activation=activation(config, "activation_function", "relu"),
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )
