"""ERNIE 4.5 (dense): Llama that rotates heads in interleaved pairs, with its own head size."""

from antiphon.services.engine.models.config_fields import Config, boolean, integer, llama_like
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import llama_layout

ARCHITECTURES = ("Ernie4_5ForCausalLM",)
layout = llama_layout

_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}
_HEAD_DIM = 128


def describe(config: Config) -> DecoderDescription:
    """Returns the description. `use_bias` applies to all projections."""
    bias = boolean(config, "use_bias", False)
    fields = {**_DEFAULTS, **config, "head_dim": integer(config, "head_dim", _HEAD_DIM)}
    return llama_like(fields, "ernie", interleaved=True, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
