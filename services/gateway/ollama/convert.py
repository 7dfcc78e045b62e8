"""Converts the bodies of Ollama's API to the bodies of chat and completion requests. Pure.

Every error names the parameter of Ollama's API.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.ollama import options
from services.gateway.ollama.conversation import turns_of, with_pictures
from services.gateway.ollama.schemas import OllamaChatBody, OllamaFields, OllamaGenerateBody
from services.gateway.openai.bodies import parameters
from services.gateway.openai.bodies.parameter_names import new_name, renamed
from services.gateway.openai.bodies.parameters import RequestDefaults
from services.gateway.openai.chat import ChatRequest, chat_request
from services.gateway.openai.completions import completion_request
from services.gateway.openai.schemas import ChatBody, CompletionBody
from services.gateway.openai.tools.answer_format import reasoning_format
from shared.config import GatewaySettings
from shared.request.checks import refuse, unsupported
from shared.request.conversation import Turn

_FORMAT = "format"
_EFFORTS = ("low", "medium", "high")
_NAMES = {**options.NAMES, "guided_json": _FORMAT, "guided_json_object": _FORMAT}


def chat(
    body: OllamaChatBody, card: ModelCard, request_id: str, defaults: RequestDefaults, settings: GatewaySettings
) -> ChatRequest:
    """Returns the request of `/api/chat`. Raises ServiceError naming the first parameter that is wrong."""
    turns = turns_of(body.messages or [])
    if turns and turns[-1].role == "assistant":
        path = f"messages[{len(turns) - 1}].role"
        unsupported(path, f"'{path}' must be 'user': continuing a message of the assistant is")
    return _chat(body, turns, body.tools, card, request_id, defaults, settings)


def generate(
    body: OllamaGenerateBody, card: ModelCard, request_id: str, defaults: RequestDefaults, settings: GatewaySettings
) -> ChatRequest:
    """Returns the request of `/api/generate`: a conversation of one message, unless `raw` is true.

    Raises ServiceError naming the first parameter that is wrong.
    """
    prompt = body.prompt or ""
    if not body.raw:
        system = [Turn(role="system", content=body.system)] if body.system else []
        turns = [*system, Turn(role="user", content=with_pictures(prompt, body.images, "images"))]
        return _chat(body, turns, None, card, request_id, defaults, settings)
    if body.system:
        unsupported("system", "'system' with 'raw' is")
    if body.images:
        unsupported("images", "'images' with 'raw' is")
    if body.think:
        refuse("think", "cannot be true together with 'raw'")
    fields = _fields(body, card)
    with renamed(_NAMES):
        request = completion_request(CompletionBody(prompt=prompt, **fields), card, request_id, defaults)
    if fields["max_tokens"] is None:
        request = replace(request, params=parameters.without_limit(request.params))
    return ChatRequest(_with_format_named(request), None)


def _chat(
    body: OllamaFields,
    turns: list[Turn],
    tools: list[Any] | None,
    card: ModelCard,
    request_id: str,
    defaults: RequestDefaults,
    settings: GatewaySettings,
) -> ChatRequest:
    fields = {**_fields(body, card), **_reasoning(body.think, card, settings)}
    with renamed(_NAMES):
        chat_body = ChatBody(messages=turns, tools=tools, **fields)
        request, answer = chat_request(chat_body, card, request_id, defaults, settings)
    return ChatRequest(_with_format_named(request), answer)


def _reasoning(think: Any, card: ModelCard, settings: GatewaySettings) -> dict[str, Any]:
    """Returns `think` as fields of a chat body. Raises ServiceError if it asks for reasoning of an unknown format."""
    if think is not None and not isinstance(think, bool) and think not in _EFFORTS:
        refuse("think", f"must be true, false or one of {', '.join(_EFFORTS)}")
    if think and reasoning_format(card, settings) is None:
        refuse("think", "needs a model whose chat template shows how it reasons, or --reasoning-parser")
    return {"include_reasoning": think is not False, "reasoning_effort": think if isinstance(think, str) else None}


def _with_format_named(request: GenerationRequest) -> GenerationRequest:
    # Tokenizers report this parameter if the grammar cannot be used.
    return replace(request, grammar_param=new_name(request.grammar_param, _NAMES))


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
