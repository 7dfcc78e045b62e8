"""Describes the models that can be used, in Ollama's format. Pure.

Fields that only Ollama's own model files have (sizes, digests, licenses, families) are empty.
"""

from collections.abc import Sequence
from typing import Any

from services.gateway.generation import ModelCard
from services.gateway.ollama.encoder import timestamp
from services.gateway.openai.tools.answer_format import knows_calls, reasoning_format
from shared.config import GatewaySettings

DEFAULT_TAG = ":latest"
"""Ollama's clients add this tag to a name without one."""
_DETAILS: dict[str, Any] = {
    "parent_model": "",
    "format": "safetensors",
    "family": "",
    "families": None,
    "parameter_size": "",
    "quantization_level": "",
}


def tags(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """Returns the answer of `/api/tags`."""
    return {"models": [_tag(card) for card in cards]}


def show(card: ModelCard, settings: GatewaySettings) -> dict[str, Any]:
    """Returns the answer of `/api/show`."""
    abilities = {
        "vision": card.takes_pictures,
        "tools": knows_calls(card, settings),
        "thinking": reasoning_format(card, settings) is not None,
    }
    return {
        "modelfile": f"FROM {card.path}",
        "parameters": "",
        "template": "",
        "details": _DETAILS,
        "model_info": {
            "general.architecture": "antiphon",
            "general.basename": card.name,
            "antiphon.context_length": card.max_model_len,
            "antiphon.vocab_size": card.vocab_size,
        },
        "capabilities": ["completion", *(name for name, has in abilities.items() if has)],
        "modified_at": timestamp(card.created),
    }


def _tag(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": timestamp(card.created),
        "size": 0,
        "digest": "",
        "details": _DETAILS,
    }
