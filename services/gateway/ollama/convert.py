"""Converts the bodies of Ollama's API to the bodies of chat and completion requests. Pure.

Every error names the parameter of Ollama's API.
"""

from dataclasses import replace

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.ollama import options
from services.gateway.ollama.schemas import OllamaChatBody, OllamaGenerateBody, OllamaMessage
from services.gateway.openai import parameters
from services.gateway.openai.parameter_names import renamed
from services.gateway.openai.parameters import RequestDefaults
from services.gateway.openai.schemas import ChatBody, CompletionBody
from shared.request.checks import missing, unsupported
from shared.request.conversation import Turn


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
    fields = options.sampling_fields(options.read(body.options, card.max_model_len))
    with renamed(options.NAMES):
        request = parameters.completion(CompletionBody(prompt=body.prompt, **fields), card, request_id, defaults)
    if fields["max_tokens"] is not None:
        return request
    return replace(request, params=parameters.without_limit(request.params))


def _chat(
    body: OllamaChatBody | OllamaGenerateBody,
    turns: list[Turn],
    card: ModelCard,
    request_id: str,
    defaults: RequestDefaults,
) -> GenerationRequest:
    fields = options.sampling_fields(options.read(body.options, card.max_model_len))
    with renamed(options.NAMES):
        return parameters.chat(ChatBody(messages=turns, **fields), card, request_id, defaults)


def _turn(message: OllamaMessage, path: str) -> Turn:
    for name in ("images", "tool_calls"):
        if getattr(message, name):
            unsupported(f"{path}.{name}", f"The field '{path}.{name}' is")
    return Turn(role=message.role, content=message.content)
