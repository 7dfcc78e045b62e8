"""Converts the bodies of Anthropic's API to the body of a chat request. Pure.

Every error names the parameter of Anthropic's API.
"""

from collections.abc import Sequence

from services.gateway.anthropic.schemas import Content, CountTokensBody, InputMessage, MessagesBody
from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.openai import parameters
from services.gateway.openai.content_blocks import content_text
from services.gateway.openai.parameter_names import renamed
from services.gateway.openai.parameters import RequestDefaults
from services.gateway.openai.schemas import ChatBody, TokenizeBody
from shared import limits
from shared.request.checks import missing, refuse, unsupported
from shared.request.conversation import Turn

_TEXT = ("text",)
_NO_EFFECT = ("cache_control", "citations")
_NAMES = {"stop": "stop_sequences"}
_ROLES = ("user", "assistant")


def messages(body: MessagesBody, card: ModelCard, request_id: str, defaults: RequestDefaults) -> GenerationRequest:
    """Returns the request of `/v1/messages`. Raises ServiceError naming the first parameter that is wrong."""
    if body.max_tokens is None:
        missing("max_tokens")
    chat = ChatBody(
        messages=turns(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
    )
    with renamed(_NAMES):
        return parameters.chat(chat, card, request_id, defaults)


def count_tokens(body: CountTokensBody, card: ModelCard, request_id: str) -> GenerationRequest:
    """Returns the request whose prompt `/v1/messages/count_tokens` counts. Raises ServiceError, see `messages`."""
    return parameters.tokenize(TokenizeBody(messages=turns(body)), card, request_id)


def turns(body: CountTokensBody) -> list[Turn]:
    """Returns the conversation of a body: the system prompt, then the messages.

    Successive messages of one role become one turn, as Anthropic's API describes it; most chat templates need turns
    that alternate.
    """
    if body.messages is None:
        missing("messages")
    if not 1 <= len(body.messages) <= limits.MESSAGES_MAX - 1:
        refuse("messages", f"must hold between 1 and {limits.MESSAGES_MAX - 1} messages")
    conversation = _conversation(body.messages)
    if conversation[-1].role == "assistant":
        path = f"messages[{len(body.messages) - 1}].role"
        unsupported(path, f"'{path}' must be 'user': continuing a message of the assistant is")
    return [*_system(body.system), *conversation]


def _system(system: Content | None) -> list[Turn]:
    text = "" if system is None else content_text(system, "system", _TEXT, _NO_EFFECT)
    return [Turn(role="system", content=text)] if text else []


def _conversation(every: Sequence[InputMessage]) -> list[Turn]:
    found: list[Turn] = []
    for number, message in enumerate(every):
        path = f"messages[{number}]"
        if message.role not in _ROLES:
            refuse(f"{path}.role", "must be 'user' or 'assistant'; the system prompt is the field 'system'")
        text = content_text(message.content, f"{path}.content", _TEXT, _NO_EFFECT)
        if found and found[-1].role == message.role:
            text = f"{found.pop().content}\n{text}"
        found.append(Turn(role=message.role, content=text))
    return found
