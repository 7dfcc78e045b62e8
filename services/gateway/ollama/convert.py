"""Converts the bodies of Ollama's API to the bodies of chat and completion requests. Pure.

Every error names the parameter of Ollama's API.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.ollama import options
from services.gateway.ollama.schemas import OllamaChatBody, OllamaFields, OllamaGenerateBody, OllamaMessage
from services.gateway.openai import parameters
from services.gateway.openai.parameter_names import renamed
from services.gateway.openai.parameters import RequestDefaults
from services.gateway.openai.schemas import ChatBody, CompletionBody
from shared.request.checks import missing, refuse, unsupported
from shared.request.conversation import Turn

_FORMAT = "format"
_NAMES = {**options.NAMES, "guided_json": _FORMAT, "guided_json_object": _FORMAT}


def chat(body: OllamaChatBody, card: ModelCard, request_id: str, defaults: RequestDefaults) -> GenerationRequest:
    """Returns the request of `/api/chat`. Raises ServiceError naming the first parameter that is wrong."""
    messages = body.messages or []
    turns = [_turn(message, f"messages[{number}]") for number, message in enumerate(messages)]
    if turns and turns[-1].role == "assistant":
        path = f"messages[{len(turns) - 1}].role"
        unsupported(path, f"'{path}' must be 'user': continuing a message of the assistant is")
    return _chat(body, turns, card, request_id, defaults)


def generate(
    body: OllamaGenerateBody, card: ModelCard, request_id: str, defaults: RequestDefaults
) -> GenerationRequest:
    """Returns the request of `/api/generate`: a conversation of one message, unless `raw` is true.

    Raises ServiceError naming the first parameter that is wrong.
    """
    if body.prompt is None:
        missing("prompt")
    if not body.raw:
        system = [Turn(role="system", content=body.system)] if body.system else []
        return _chat(body, [*system, Turn(role="user", content=body.prompt)], card, request_id, defaults)
    if body.system:
        unsupported("system", "'system' with 'raw' is")
    fields = _fields(body, card)
    with renamed(_NAMES):
        request = parameters.completion(CompletionBody(prompt=body.prompt, **fields), card, request_id, defaults)
    if fields["max_tokens"] is None:
        request = replace(request, params=parameters.without_limit(request.params))
    return _with_format_named(request)


def _chat(
    body: OllamaFields,
    turns: list[Turn],
    card: ModelCard,
    request_id: str,
    defaults: RequestDefaults,
) -> GenerationRequest:
    fields = _fields(body, card)
    with renamed(_NAMES):
        request = parameters.chat(ChatBody(messages=turns, **fields), card, request_id, defaults)
    return _with_format_named(request)


def _with_format_named(request: GenerationRequest) -> GenerationRequest:
    # Tokenizers name this parameter if the grammar cannot be used.
    return replace(request, grammar_param=_FORMAT if request.grammar_param else "")


def _fields(body: OllamaFields, card: ModelCard) -> dict[str, Any]:
    """Returns the options and the format as fields of a chat or completion body."""
    return {**options.sampling_fields(options.read(body.options, card.max_model_len)), **_structure(body.format)}


def _structure(wanted: Any) -> dict[str, Any]:
    if wanted is None or wanted == "":
        return {}
    if wanted == "json":
        return {"guided_json_object": True}
    if not isinstance(wanted, Mapping):
        refuse(_FORMAT, "must be 'json' or a JSON Schema: an object")
    return {"guided_json": wanted}


def _turn(message: OllamaMessage, path: str) -> Turn:
    for name in ("images", "tool_calls"):
        if getattr(message, name):
            unsupported(f"{path}.{name}", f"The field '{path}.{name}' is")
    return Turn(role=message.role, content=message.content)
