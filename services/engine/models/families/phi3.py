"""Phi-3 and Phi-4: Llama with fused query-key-value and gate-up projections; long contexts by longrope."""

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.config_fields import Config, integer, llama_like, sliding_window
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layout import Names, named_layout

ARCHITECTURES = ("Phi3ForCausalLM",)
ABOUT = About(reasoning=("qwen3",), limits="[long contexts](#long-contexts) only with `--max-model-len`")
layout = named_layout(Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)))


def describe(config: Config) -> DecoderDescription:
    """Returns the description. Older configs call longrope `su`, with the original context outside `rope_scaling`."""
    original = integer(config, "original_max_position_embeddings", 4096)
    scaling = {key: _renamed(config.get(key), original) for key in ("rope_scaling", "rope_parameters")}
    fields = {"rms_norm_eps": 1e-5, **config, **scaling}
    return llama_like(fields, "phi3", sliding_windows=sliding_window(config))


def _renamed(scaling: object, original: int) -> object:
    if not isinstance(scaling, dict) or "short_factor" not in scaling:
        return scaling
    return {"original_max_position_embeddings": original, **scaling, "rope_type": "longrope"}
