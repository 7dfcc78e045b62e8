"""Converts the bodies of Anthropic's API to the body of a chat request. Pure.

Every error names the parameter of Anthropic's API.
"""

from typing import Any

from msgspec.structs import replace

from antiphon.services.gateway.apis.anthropic import cache_control, conversation, thinking, tools
from antiphon.services.gateway.apis.anthropic.schemas import Content, CountTokensBody, MessagesBody
from antiphon.services.gateway.apis.openai.bodies import parameters
from antiphon.services.gateway.apis.openai.bodies.content_blocks import content_text
from antiphon.services.gateway.apis.openai.bodies.parameter_names import renamed
from antiphon.services.gateway.apis.openai.bodies.parameters import RequestDefaults
from antiphon.services.gateway.apis.openai.chat import ChatRequest, chat_request, follows_budget, tokenize_request
from antiphon.services.gateway.apis.openai.schemas import ChatBody, TokenizeBody
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.shared import limits
from antiphon.shared.config import GatewaySettings
from antiphon.shared.request.checks import missing, refuse
from antiphon.shared.request.conversation import Turn

_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    **tools.NAMES,
}


def messages(
    body: MessagesBody, card: ModelCard, request_id: str, defaults: RequestDefaults, settings: GatewaySettings
) -> ChatRequest:
    """Returns the request of `/v1/messages`. Raises ServiceError naming the first parameter that is wrong."""
    if body.max_tokens is None:
        missing("max_tokens")
    kept_s = cache_control.taken(body, keeps_kv=card.kept_block_size > 0)
    conversation_of = turns(body)
    chat = ChatBody(
        messages=conversation_of,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        include_reasoning=thinking.shown(body).has_blocks,
        thinking_token_budget=thinking.budget(body),
        **thinking.template_fields(body),
        **thinking.output_fields(body),
        **tools.tool_fields(body),
        **continuation(conversation_of),
    )
    with renamed(_NAMES):
        converted = chat_request(chat, card, request_id, defaults, settings)
    if not follows_budget(chat, converted):
        ignore(_NAMES["thinking_token_budget"])
    request = parameters.with_grammar_named(converted.request, _NAMES)
    return ChatRequest(replace(request, kv_keep_s=kept_s), converted.answer)


def count_tokens(body: CountTokensBody, card: ModelCard, request_id: str, images_max: int) -> GenerationRequest:
    """Returns the request whose prompt `/v1/messages/count_tokens` counts. Raises ServiceError, see `messages`."""
    with renamed(_NAMES):
        said, fields = turns(body), {**thinking.template_fields(body), **tools.tool_fields(body)}
        counted = TokenizeBody(messages=said, **fields, **continuation(said))
        return tokenize_request(counted, card, request_id, images_max)


def turns(body: CountTokensBody) -> list[Turn]:
    """Returns the conversation of a body: the system prompt, then the messages. Raises ServiceError."""
    if body.messages is None:
        missing("messages")
    if not 1 <= len(body.messages) <= limits.MESSAGES_MAX - 1:
        refuse("messages", f"must hold between 1 and {limits.MESSAGES_MAX - 1} messages")
    found = [*_system(body.system), *conversation.turns_of(body.messages)]
    if len(found) > limits.MESSAGES_MAX:
        refuse("messages", f"must not hold more than {limits.MESSAGES_MAX} messages and results of tools")
    return found


def continuation(said: list[Turn]) -> dict[str, Any]:
    """Returns the field with which the answer continues the conversation's last message, if that is the assistant's."""
    is_open = said[-1].role == "assistant" and not said[-1].tool_calls
    return {"continue_final_message": True} if is_open else {}


def _system(system: Content | None) -> list[Turn]:
    text = "" if system is None else content_text(system, "system", conversation.TEXT, conversation.NO_EFFECT)
    return [Turn(role="system", content=text)] if text else []
