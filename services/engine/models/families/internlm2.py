"""InternLM2 and 2.5: Llama with a fused query-key-value projection grouped by key head, and other tensor names."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, boolean, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("InternLM2ForCausalLM",)
ABOUT = About(limits="dynamic scaling: contexts up to `max_position_embeddings`")
layout = named_layout(
    Names(
        embedding="model.tok_embeddings",
        head="output",
        input_norm="attention_norm",
        qkv=("attention.wqkv",),
        o="attention.wo",
        mlp_norm="ffn_norm",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        grouped_qkv=True,
    )
)


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `bias` applies to all projections of the attention."""
    bias = boolean(config, "bias", False)
    return llama_like(config, "internlm2", qkv_bias=bias, o_bias=bias)
