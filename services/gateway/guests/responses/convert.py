"""Converts the body of a response to the body of a chat request. Pure.

Every error names the parameter of the Responses API.
"""

from typing import Any

from msgspec.structs import replace

from antiphon.services.gateway.apis.openai.bodies import parameters
from antiphon.services.gateway.apis.openai.bodies.content_blocks import check_fields
from antiphon.services.gateway.apis.openai.bodies.metadata import check_metadata
from antiphon.services.gateway.apis.openai.bodies.parameter_names import renamed
from antiphon.services.gateway.apis.openai.bodies.parameters import RequestDefaults
from antiphon.services.gateway.apis.openai.body import SamplerFields
from antiphon.services.gateway.apis.openai.chat import ChatRequest, chat_request, follows_budget
from antiphon.services.gateway.apis.openai.schemas import ChatBody
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.guests.responses import text_format, tools
from antiphon.services.gateway.guests.responses.schemas import IMAGE_URLS, LOGPROBS, REASONING, ResponsesBody
from antiphon.services.gateway.guests.responses.tools import Tools
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared import limits
from antiphon.shared.config import GatewaySettings
from antiphon.shared.request.checks import refuse
from antiphon.shared.request.conversation import Turn

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    **text_format.NAMES,
    **tools.NAMES,
}
_SAMPLING = (
    *SamplerFields.__struct_fields__,
    "min_tokens",
    "repetition_penalty",
    "stop",
    "ignore_eos",
    "priority",
    "service_tier",
    "cache_salt",
    "prompt_cache_retention",
)
"""Fields that have the same name and meaning in a chat body."""


def response_request(
    body: ResponsesBody,
    turns: list[Turn],
    told: Tools,
    card: ModelCard,
    request_id: str,
    defaults: RequestDefaults,
    settings: GatewaySettings,
) -> ChatRequest:
    """Returns the request of a response. `turns`: the whole conversation; `told`: its tools. Raises ServiceError."""
    chat = ChatBody(
        messages=turns,
        max_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs,
        include_reasoning=shows_reasoning(body),
        reasoning_effort=reasoning_effort(body),
        thinking_token_budget=thinking_budget(body),
        **tools.tool_fields(body, told),
        **text_format.structure_fields(body.text),
        **{name: getattr(body, name) for name in _SAMPLING},
    )
    with renamed(_NAMES):
        request, answer = converted = chat_request(chat, card, request_id, defaults, settings)
    if not follows_budget(chat, converted):
        ignore(_NAMES["thinking_token_budget"])
    request = parameters.with_grammar_named(request, _NAMES)
    return ChatRequest(replace(request, inputs=replace(request.inputs, names=("input",))), answer)


def check(body: ResponsesBody) -> None:
    """Raises ServiceError for fields that only this API has, or that it stores and returns without any other effect."""
    if body.background and body.store is False:
        refuse("background", "needs 'store' to be true: a background response is read from the store")
    for name in body.include or ():
        if name not in (LOGPROBS, IMAGE_URLS, REASONING):
            ignore(f"include.{name}")
    if body.truncation not in (None, "auto", "disabled"):
        refuse("truncation", "must be 'auto' or 'disabled'")
    check_fields(body.reasoning or {}, ("effort", "summary", "max_tokens"), "reasoning")
    budget = thinking_budget(body)
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool)):
        refuse("reasoning.max_tokens", "must be an integer")
    effort = reasoning_effort(body)
    if effort is not None and not isinstance(effort, str):
        refuse("reasoning.effort", "must be a string")
    check_metadata(body.metadata)
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        if len(getattr(body, name) or "") > limits.IDENTIFIER_CHARS_MAX:
            refuse(name, f"must have at most {limits.IDENTIFIER_CHARS_MAX} characters")


def conversation_of(body: ResponsesBody) -> str | None:
    """Returns the id of the conversation that a response belongs to. Raises ServiceError."""
    given = body.conversation
    conversation_id = given.get("id") if isinstance(given, dict) else given
    if given is not None and (not isinstance(conversation_id, str) or (isinstance(given, dict) and len(given) > 1)):
        refuse("conversation", "must be the id of a conversation, or an object with its 'id'")
    if conversation_id is not None and body.previous_response_id is not None:
        refuse("conversation", "cannot be given together with 'previous_response_id': provide only one of them")
    return conversation_id


def shows_reasoning(body: ResponsesBody) -> bool:
    """Whether the output has items of reasoning: the client asks for a summary, or for what it can send back."""
    return (body.reasoning or {}).get("summary") is not None or REASONING in (body.include or ())


def reasoning_effort(body: ResponsesBody) -> Any:
    """Returns `reasoning.effort`; None if the request does not have it. The value is not checked."""
    return (body.reasoning or {}).get("effort")


def thinking_budget(body: ResponsesBody) -> Any:
    """Returns `reasoning.max_tokens`, the largest number of tokens of reasoning; None: no limit. It is not checked."""
    return (body.reasoning or {}).get("max_tokens")
