"""Converts the body of a chat request: to the request for the backend, and to the format of its answer.

The other APIs (`anthropic`, `responses`, `ollama`) convert their bodies to a chat body and use this module as well.
"""

from dataclasses import replace
from typing import NamedTuple

import msgspec

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.openai.bodies import parameters
from services.gateway.openai.bodies.parameters import RequestDefaults
from services.gateway.openai.schemas import ChatBody
from services.gateway.openai.tools.answer_format import AnswerFormat, answer_format, reasoning_format, tool_format
from services.gateway.openai.tools.strict_calls import strict_calls
from services.gateway.openai.tools.tool_choice import ToolChoice, tool_choice
from shared.config import GatewaySettings
from shared.request.checks import refuse


class ChatRequest(NamedTuple):
    """A converted chat request. `answer` is None if the whole output is the answer's text."""

    request: GenerationRequest
    answer: AnswerFormat | None


def chat_request(
    body: ChatBody, card: ModelCard, request_id: str, defaults: RequestDefaults, settings: GatewaySettings
) -> ChatRequest:
    """Returns the converted request. Raises ServiceError naming the first parameter that is wrong."""
    request = parameters.chat(body, card, request_id, defaults)
    answer = answer_format(body, request, card, settings)
    choice = tool_choice(body)
    if choice.strict_param is not None:
        request = _with_strict_calls(request, choice, card, settings)
    if answer is not None:
        request = replace(request, shown_special_tokens=answer.special_tokens)
    return ChatRequest(request, answer)


def _with_strict_calls(
    request: GenerationRequest, choice: ToolChoice, card: ModelCard, settings: GatewaySettings
) -> GenerationRequest:
    structure = strict_calls(choice, tool_format(choice, card, settings), reasoning_format(card, settings))
    if structure is None:
        return request
    assert choice.strict_param is not None
    grammar = request.params.grammar
    if grammar is not None and grammar.kind != "structural_tag":
        return request  # The output has this structure from its first token on, so it has no calls.
    if grammar is not None:
        refuse(choice.strict_param, f"cannot be true together with '{request.grammar_param}'")
    if request.params.beam is not None:
        refuse(choice.strict_param, "cannot be true together with 'use_beam_search'")
    params = msgspec.structs.replace(request.params, grammar=structure.grammar)
    return replace(request, params=params, grammar_param=structure.param)
