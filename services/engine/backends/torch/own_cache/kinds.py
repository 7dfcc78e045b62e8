"""Lists the models that run with transformers' own cache: state spaces, linear attention, layers with different heads.

Pure.

The types are those of config.json (`model_type`). Each was compared with transformers token by token.
"""

from collections.abc import Mapping
from typing import Any

from antiphon.services.engine.models.about import About
from antiphon.services.engine.models.registry import has_family

_BY_TOKEN = {
    "zamba": About(models="Zamba"),
}
"""Model types whose state transformers can extend only one token at a time."""
_BY_CHUNK = {
    "bloom": About(models="Bloom"),
    "codegen": About(models="CodeGen"),
    "gpt_bigcode": About(models="StarCoder 1"),
    "gptj": About(models="GPT-J"),
    "mimo_v2_flash": About(models="MiMo V2 Flash"),
    "mpt": About(models="MPT"),
    "olmo_hybrid": About(models="OLMo Hybrid"),
    "stablelm": About(models="StableLM"),
    "zaya": About(models="Zaya"),
}
"""Model types whose cache can be extended by any number of tokens."""
OWN_CACHE_TYPES = _BY_TOKEN | _BY_CHUNK
BATCHED = False
"""Whether sequences are computed together."""
KEEPS_STATES = True
"""See `EngineFacts.keeps_states`."""


def keeps_own_cache(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config.json runs with transformers' own cache."""
    return config.get("model_type") in OWN_CACHE_TYPES and not has_family(config)


def continues_by_token(config: Mapping[str, Any]) -> bool:
    """Whether a sequence's state can only be extended one token at a time."""
    return config.get("model_type") in _BY_TOKEN
