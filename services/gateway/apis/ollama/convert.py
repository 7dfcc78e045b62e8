"""Converts the bodies of Ollama's API to the bodies of chat and completion requests. Pure.

Every error names the parameter of Ollama's API.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from antiphon.services.gateway.apis.ollama import options
from antiphon.services.gateway.apis.ollama.conversation import turns_of, with_images
from antiphon.services.gateway.apis.ollama.schemas import OllamaChatBody, OllamaFields, OllamaGenerateBody
from antiphon.services.gateway.apis.openai.bodies import parameters
from antiphon.services.gateway.apis.openai.bodies.parameter_names import renamed
from antiphon.services.gateway.apis.openai.bodies.parameters import RequestDefaults
from antiphon.services.gateway.apis.openai.chat import ChatRequest, asked_logprobs, chat_request
from antiphon.services.gateway.apis.openai.completions import completion_request
from antiphon.services.gateway.apis.openai.schemas import ChatBody, CompletionBody
from antiphon.services.gateway.apis.openai.tools.answer_format import reasoning_format
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared.config import GatewaySettings
from antiphon.shared.request.checks import refuse, unsupported
from antiphon.shared.request.conversation import Turn

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
    """Returns the request of `/api/generate`: a conversation of one message, unless `raw` is true or there is a suffix.

    Raises ServiceError naming the first parameter that is wrong.
    """
    prompt = body.prompt or ""
    how = "raw" if body.raw else "suffix"
    if not (body.raw or body.suffix):
        system = [Turn(role="system", content=body.system)] if body.system else []
        turns = [*system, Turn(role="user", content=with_images(prompt, body.images, "images"))]
        return _chat(body, turns, None, card, request_id, defaults, settings)
    if body.system:
        unsupported("system", f"'system' with '{how}' is")
    if body.images:
        unsupported("images", f"'images' with '{how}' is")
    if body.think:
        refuse("think", f"cannot be true together with '{how}'")
    fields = _fields(body, card)
    logprobs = asked_logprobs(ChatBody(**_logprobs(body)), defaults.max_logprobs)
    with renamed(_NAMES):
        completion = CompletionBody(prompt=prompt, suffix=body.suffix, **fields)
        request = completion_request(completion, card, request_id, defaults)
    params = replace(request.params, logprobs=logprobs)
    if fields["max_tokens"] is None:
        params = parameters.without_limit(params)
    request = replace(request, params=params)
    return ChatRequest(parameters.with_grammar_named(request, _NAMES), None)


def _chat(
    body: OllamaFields,
    turns: list[Turn],
    tools: list[Any] | None,
    card: ModelCard,
    request_id: str,
    defaults: RequestDefaults,
    settings: GatewaySettings,
) -> ChatRequest:
    fields = {**_fields(body, card), **_logprobs(body), **_reasoning(body.think, card, settings)}
    with renamed(_NAMES):
        chat_body = ChatBody(messages=turns, tools=tools, **fields)
        request, answer = chat_request(chat_body, card, request_id, defaults, settings)
    return ChatRequest(parameters.with_grammar_named(request, _NAMES), answer)


def _reasoning(think: Any, card: ModelCard, settings: GatewaySettings) -> dict[str, Any]:
    """Returns `think` as fields of a chat body. Raises ServiceError if it asks for reasoning of an unknown format."""
    if think is not None and not isinstance(think, bool) and think not in _EFFORTS:
        refuse("think", f"must be true, false or one of {', '.join(_EFFORTS)}")
    if think and reasoning_format(card, settings) is None:
        refuse("think", "needs a model whose chat template shows how it reasons, or --reasoning-parser")
    return {
        "include_reasoning": think is not False,
        "reasoning_effort": think if isinstance(think, str) else None,
        "chat_template_kwargs": {"enable_thinking": think} if isinstance(think, bool) else None,
    }


def _fields(body: OllamaFields, card: ModelCard) -> dict[str, Any]:
    """Returns the options and the format as fields of a chat or completion body."""
    return {**options.sampling_fields(options.read(body.options, card.max_model_len)), **_structure(body.format)}


def _logprobs(body: OllamaFields) -> dict[str, Any]:
    return {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}


def _structure(wanted: Any) -> dict[str, Any]:
    if wanted is None or wanted == "":
        return {}
    if wanted == "json":
        return {"guided_json_object": True}
    if not isinstance(wanted, Mapping):
        refuse(_FORMAT, "must be 'json' or a JSON Schema: an object")
    return {"guided_json": wanted}
