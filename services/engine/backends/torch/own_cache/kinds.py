"""Lists the models that run with transformers' own cache: state spaces, linear attention, layers with different heads.

Pure.

The types are those of config.json (`model_type`). Each was compared with transformers token by token.
"""

from collections.abc import Mapping
from typing import Any

from antiphon.services.engine.models.registry import has_family

_BY_TOKEN = frozenset({"falcon_mamba", "jamba", "mamba", "zamba"})
"""Model types whose state transformers can extend only one token at a time."""
_BY_CHUNK = frozenset(
    {
        "bloom",
        "codegen",
        "falcon_h1",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "gpt_bigcode",
        "gptj",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "llama4",
        "llama4_text",
        "mamba2",
        "mimo_v2_flash",
        "mpt",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "stablelm",
        "zaya",
    }
)
"""Model types whose cache can be extended by any number of tokens."""
OWN_CACHE_TYPES = _BY_TOKEN | _BY_CHUNK


_ATTENTION = frozenset({"attention", "full_attention"})


def keeps_own_cache(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config.json runs with transformers' own cache."""
    if config.get("model_type") == "granitemoehybrid" and _ATTENTION.issuperset(config.get("layer_types") or ["mamba"]):
        # The dense Granite 4 models have this type too, but all their layers are attention.
        return False
    return config.get("model_type") in OWN_CACHE_TYPES and not has_family(config)


def continues_by_token(config: Mapping[str, Any]) -> bool:
    """Whether a sequence's state can only be extended one token at a time."""
    return config.get("model_type") in _BY_TOKEN
