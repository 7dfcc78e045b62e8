"""Describes the models that can be used, in Ollama's format. Pure.

What an engine does not know about its model is 0 or empty. Fields that only Ollama's own model files have (templates,
licenses) are empty.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from antiphon.services.gateway.apis.ollama.encoder import timestamp
from antiphon.services.gateway.apis.openai.tools.answer_format import knows_calls, reasoning_format
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared.config import GatewaySettings
from antiphon.shared.version import __version__

DEFAULT_TAG = ":latest"
"""Ollama's clients add this tag to a name without one."""
API_VERSION = "0.14.0"
"""The version of Ollama whose API is spoken here: the first one that has Anthropic's API, besides the Responses API
(0.13) and log probabilities (0.12). Clients refuse servers with an older version than they need: Codex wants 0.13.4."""
_NEVER = "9999-12-31T23:59:59Z"
_UNITS = {10**12: "T", 10**9: "B", 10**6: "M", 10**3: "K"}


def version() -> dict[str, str]:
    """Returns the answer of `/api/version`. `antiphon`: the version of this software."""
    return {"version": API_VERSION, "antiphon": __version__}


def tags(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """Returns the answer of `/api/tags`."""
    return {"models": [{**_named(card), "modified_at": timestamp(card.created)} for card in cards]}


def running(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """Returns the answer of `/api/ps`: all models, because each one is loaded and stays so."""
    return {
        "models": [
            {
                **_named(card),
                "expires_at": _NEVER,
                "size_vram": card.facts.weight_bytes if card.facts.on_device else 0,
                "context_length": card.max_model_len,
            }
            for card in cards
        ]
    }


def show(card: ModelCard, settings: GatewaySettings) -> dict[str, Any]:
    """Returns the answer of `/api/show`."""
    abilities = {
        "completion": card.generates,
        "embedding": bool(card.embedding_size) and not card.generates,  # clients offer no chat with such a model
        "vision": card.takes_images,
        "tools": knows_calls(card, settings),
        "thinking": reasoning_format(card, settings) is not None,
    }
    architecture = card.facts.architecture or "antiphon"
    return {
        "modelfile": f"FROM {card.path}",
        "parameters": "",
        "template": "",
        "details": _details(card),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": card.name,
            "general.parameter_count": card.facts.num_parameters,
            f"{architecture}.context_length": card.max_model_len,
            f"{architecture}.embedding_length": card.embedding_size,
            f"{architecture}.vocab_size": card.vocab_size,
        },
        "capabilities": [name for name, has in abilities.items() if has],
        "modified_at": timestamp(card.created),
    }


def _named(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "model": card.name,
        "size": card.facts.weight_bytes,
        "digest": _digest(card),
        "details": _details(card),
    }


def _digest(card: ModelCard) -> str:
    """Returns 64 hex digits that are equal as long as the model is: its name, its weights, its adapter."""
    parts = (card.name, card.content or card.path, str(card.facts.weight_bytes), card.adapter_version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _details(card: ModelCard) -> dict[str, Any]:
    facts = card.facts
    return {
        "parent_model": card.base,
        "format": facts.file_format,
        "family": facts.architecture,
        "families": [facts.architecture] if facts.architecture else None,
        "parameter_size": _rounded(facts.num_parameters),
        "quantization_level": facts.quantization,
    }


def _rounded(count: int) -> str:
    """Returns a number as Ollama writes it, such as `5.8M`; "" for 0."""
    unit = next((unit for unit in _UNITS if count >= unit), 1)
    return f"{count / unit:.1f}{_UNITS[unit]}" if unit > 1 else str(count or "")
