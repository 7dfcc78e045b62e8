"""Converts the bodies of Anthropic's API to the body of a chat request. Pure.

Every error names the parameter of Anthropic's API.
"""

from msgspec.structs import replace

from services.gateway.anthropic import conversation, tools
from services.gateway.anthropic.schemas import Content, CountTokensBody, MessagesBody
from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.openai.bodies.content_blocks import content_text
from services.gateway.openai.bodies.parameter_names import new_name, renamed
from services.gateway.openai.bodies.parameters import RequestDefaults
from services.gateway.openai.chat import ChatRequest, chat_request, tokenize_request
from services.gateway.openai.schemas import ChatBody, TokenizeBody
from shared import limits
from shared.config import GatewaySettings
from shared.request.checks import missing, refuse, unsupported
from shared.request.conversation import Turn

_NAMES = {"stop": "stop_sequences", **tools.NAMES}


def messages(
    body: MessagesBody, card: ModelCard, request_id: str, defaults: RequestDefaults, settings: GatewaySettings
) -> ChatRequest:
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
        # Answers of this API would have reasoning only with `thinking`, which is refused.
        include_reasoning=False,
        **tools.tool_fields(body),
    )
    with renamed(_NAMES):
        request, answer = chat_request(chat, card, request_id, defaults, settings)
    return ChatRequest(replace(request, grammar_param=new_name(request.grammar_param, _NAMES)), answer)


def count_tokens(body: CountTokensBody, card: ModelCard, request_id: str, pictures_max: int) -> GenerationRequest:
    """Returns the request whose prompt `/v1/messages/count_tokens` counts. Raises ServiceError, see `messages`."""
    with renamed(_NAMES):
        counted = TokenizeBody(messages=turns(body), **tools.tool_fields(body))
        return tokenize_request(counted, card, request_id, pictures_max)


def turns(body: CountTokensBody) -> list[Turn]:
    """Returns the conversation of a body: the system prompt, then the messages. Raises ServiceError."""
    if body.messages is None:
        missing("messages")
    if not 1 <= len(body.messages) <= limits.MESSAGES_MAX - 1:
        refuse("messages", f"must hold between 1 and {limits.MESSAGES_MAX - 1} messages")
    found = [*_system(body.system), *conversation.turns_of(body.messages)]
    if found[-1].role == "assistant":
        path = f"messages[{len(body.messages) - 1}].role"
        unsupported(path, f"'{path}' must be 'user': continuing a message of the assistant is")
    if len(found) > limits.MESSAGES_MAX:
        refuse("messages", f"must not hold more than {limits.MESSAGES_MAX} messages and results of tools")
    return found


def _system(system: Content | None) -> list[Turn]:
    text = "" if system is None else content_text(system, "system", conversation.TEXT, conversation.NO_EFFECT)
    return [Turn(role="system", content=text)] if text else []
