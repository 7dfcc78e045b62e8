"""Converts the body of a response to the body of a chat request. Pure.

Every error names the parameter of the Responses API.
"""

from typing import Any

from msgspec.structs import replace

from services.gateway.generation import ModelCard
from services.gateway.openai.bodies.metadata import check_metadata
from services.gateway.openai.bodies.parameter_names import new_name, renamed
from services.gateway.openai.bodies.parameters import RequestDefaults
from services.gateway.openai.chat import ChatRequest, chat_request
from services.gateway.openai.schemas import ChatBody
from services.gateway.responses import text_format, tools
from services.gateway.responses.schemas import LOGPROBS, PICTURE_URLS, ResponsesBody
from shared.config import GatewaySettings
from shared.request.checks import refuse, unsupported
from shared.request.conversation import Turn

_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
    **text_format.NAMES,
    **tools.NAMES,
}
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "priority",
    "service_tier",
    "cache_salt",
)
"""Fields that have the same name and meaning in a chat body."""


def response_request(
    body: ResponsesBody,
    turns: list[Turn],
    card: ModelCard,
    request_id: str,
    defaults: RequestDefaults,
    settings: GatewaySettings,
) -> ChatRequest:
    """Returns the request of a response. `turns`: the whole conversation. Raises ServiceError."""
    chat = ChatBody(
        messages=turns,
        max_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs,
        # Answers of this API have no reasoning, only summaries on request, which are refused.
        include_reasoning=False,
        reasoning_effort=reasoning_effort(body),
        **tools.tool_fields(body),
        **text_format.structure_fields(body.text),
        **{name: getattr(body, name) for name in _SAMPLING},
    )
    with renamed(_NAMES):
        request, answer = chat_request(chat, card, request_id, defaults, settings)
    grammar_param = new_name(request.grammar_param, _NAMES)
    return ChatRequest(replace(request, grammar_param=grammar_param, prompt_names=("input",)), answer)


def check(body: ResponsesBody) -> None:
    """Raises ServiceError for fields that only this API has: `include`, `metadata`, `background`, `reasoning`."""
    if body.background and body.store is False:
        refuse("background", "needs 'store' to be true: a background response is read from the store")
    for number, name in enumerate(body.include or ()):
        if name not in (LOGPROBS, PICTURE_URLS):
            unsupported(f"include[{number}]", f"Including '{name}' in a response is")
    for name, value in (body.reasoning or {}).items():
        if name != "effort" and value is not None:
            unsupported(f"reasoning.{name}", f"'reasoning.{name}' is")
    effort = reasoning_effort(body)
    if effort is not None and not isinstance(effort, str):
        refuse("reasoning.effort", "must be a string")
    check_metadata(body.metadata)


def reasoning_effort(body: ResponsesBody) -> Any:
    """Returns `reasoning.effort`; None if the request does not have it. The value is not checked."""
    return (body.reasoning or {}).get("effort")
