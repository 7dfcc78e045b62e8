"""`POST /v1/chat/completions`: the endpoint, and the conversion of its body to a `GenerationRequest`.

The conversion gives a request its defaults and checks it; every error names the parameter. `bodies.parameters` is the
part that chat and completions share. The other APIs (`anthropic`, `responses`, `ollama`) convert their bodies to a chat
body and use the conversion as well.
"""

from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai import schemas
from antiphon.services.gateway.apis.openai.answers.stream_encoder import OpenAIEncoder
from antiphon.services.gateway.apis.openai.bodies import parameters, request_fields
from antiphon.services.gateway.apis.openai.bodies.image_parts import results_in_words, take_into
from antiphon.services.gateway.apis.openai.bodies.parameters import DEFAULTS, EndpointDefaults, RequestDefaults
from antiphon.services.gateway.apis.openai.request_context import Arrival
from antiphon.services.gateway.apis.openai.schemas import ChatBody, TokenizeBody
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.apis.openai.tools.answer_format import (
    AnswerFormat,
    answer_format,
    reasoning_format,
    tool_format,
)
from antiphon.services.gateway.apis.openai.tools.forced_calls import forced_calls
from antiphon.services.gateway.apis.openai.tools.strict_calls import strict_calls
from antiphon.services.gateway.apis.openai.tools.tool_choice import NO_TOOLS, ToolChoice, tool_choice
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard, PromptInputs
from antiphon.shared import limits
from antiphon.shared.config import GatewaySettings
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.request import checks, conversation
from antiphon.shared.request.checks import given, refuse
from antiphon.shared.request.images import ImageInput, check_images
from antiphon.shared.request.structured import Constraint
from antiphon.shared.request.tools import checked_documents, checked_template_kwargs, template_variables

_BUDGET, _NO_BUDGET = "thinking_token_budget", -1
_ROLE = attrgetter("role")


class ChatEndpoint:
    """The endpoint that continues a conversation."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def chat_completions(self, request: Request) -> Response:
        """Continues a conversation. Raises ServiceError."""
        arrival, serving = Arrival.of(request), self._serving
        data = request.state.body = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.CHAT_DECODER)
        card, request_id = serving.backend.resolve_model(body.model), request.state.request_id
        converted = chat_request(body, card, request_id, serving.defaults_of(request), serving.settings)
        if body.thinking_token_budget is not None and not follows_budget(body, converted):
            ignore(_BUDGET)
        context = await serving.context_of("chat", arrival, card, converted.request, body)
        context = replace(context, answer_format=converted.answer)
        return await serving.answer(request, context, OpenAIEncoder(context))


class ChatRequest(NamedTuple):
    """A converted chat request. `answer` is None if the whole output is the answer's text."""

    request: GenerationRequest
    answer: AnswerFormat | None


def chat_request(
    body: ChatBody, card: ModelCard, request_id: str, defaults: RequestDefaults, settings: GatewaySettings
) -> ChatRequest:
    """Returns the converted request. Raises ServiceError naming the first parameter that is wrong."""
    request, choice = _without_calls(body, card, request_id, defaults)
    answer = None
    if choice is not NO_TOOLS or card.reasoning_format or settings.reasoning_parser != "auto":
        answer = answer_format(body, request, choice, card, settings)
    if choice is not NO_TOOLS:
        request = _with_calls(request, choice, card, settings)
    if answer is not None:
        request = replace(request, output=replace(request.output, shown_special_tokens=answer.special_tokens))
    if body.thinking_token_budget is not None:
        request = _with_thinking_limit(request, min(body.thinking_token_budget, card.max_model_len), answer)
    return ChatRequest(request, answer)


def follows_budget(body: ChatBody, converted: ChatRequest) -> bool:
    """Whether the request has the limit of reasoning that its body asks for, if it asks for one.

    It has none if the output has no reasoning that is separated from the answer.
    """
    return body.thinking_token_budget in (None, _NO_BUDGET) or converted.request.pending.thinking is not None


def _with_thinking_limit(request: GenerationRequest, budget: int, answer: AnswerFormat | None) -> GenerationRequest:
    if budget == _NO_BUDGET:
        return request
    if budget < _NO_BUDGET:
        refuse(_BUDGET, "must not be negative, except -1 for no limit")
    if request.params.beam is not None:
        refuse(_BUDGET, "cannot be given together with 'use_beam_search'")
    thinking = None if answer is None else answer.thinking_limit(budget)
    return replace(request, pending=replace(request.pending, thinking=thinking))


def generation_request(
    body: ChatBody, card: ModelCard, request_id: str, defaults: RequestDefaults = DEFAULTS
) -> GenerationRequest:
    """Returns the request of `/v1/chat/completions` without the structure of tool calls.

    Raises ServiceError naming the first parameter that is wrong.
    """
    return _without_calls(body, card, request_id, defaults)[0]


def _without_calls(
    body: ChatBody, card: ModelCard, request_id: str, defaults: RequestDefaults
) -> tuple[GenerationRequest, ToolChoice]:
    most, of_output, of_prompt = defaults.max_logprobs, None, None
    if body.logprobs is not None or body.top_logprobs is not None:
        of_output = asked_logprobs(body, most)
    if body.prompt_logprobs is not None:
        of_prompt = checks.prompt_logprobs(body.prompt_logprobs, most)
    endpoint = EndpointDefaults(parameters.AS_MANY_AS_FIT, defaults.chat_temperature)
    params = parameters.checked_params(body, card, endpoint, (of_output, of_prompt), defaults.draw_seed)
    choice = _choice_of(body)
    request = parameters.checked_request(body, card, request_id, params, 1)
    structure = parameters.structure_of(body)
    if choice is not NO_TOOLS and choice.is_forced:
        _check_forced(body, choice, structure)
    elif structure is not None:
        request = parameters.with_structure(request, structure)
    images: list[ImageInput] | None = [] if card.takes_images else None
    request = _with_conversation(request, body, card, choice, images)
    if not images:
        return request, choice
    request = _with_images(request, images, defaults.images_max)
    if request.inputs.truncate_prompt_tokens:
        refuse("truncate_prompt_tokens", "cannot be given together with images, which could be cut")
    if params.prompt_logprobs is not None:
        refuse("prompt_logprobs", "cannot be given together with images")
    return request, choice


def _choice_of(body: ChatBody) -> ToolChoice:
    # `tool_choice` is not entered for what most requests ask: nothing.
    if body.tools or body.functions or body.tool_choice is not None or body.function_call is not None:
        return tool_choice(body)
    return NO_TOOLS


def tokenize_request(
    body: TokenizeBody, card: ModelCard, request_id: str, images_max: int = limits.IMAGES_MAX
) -> GenerationRequest:
    """Returns the request of `/tokenize`. Raises ServiceError naming the first parameter that is wrong."""
    if body.prompt is not None and body.messages is not None:
        refuse("messages", "cannot be given together with 'prompt'")
    request = GenerationRequest(request_id=request_id, model=card.name, params=SamplingParams())
    if body.messages is None:
        texts, _ = parameters.prompts(body.prompt, card.vocab_size)
        inputs = PromptInputs(texts=texts, add_special_tokens=given(body.add_special_tokens, True))
        return replace(request, inputs=inputs)
    images: list[ImageInput] | None = [] if card.takes_images else None
    request = _with_conversation(request, body, card, _choice_of(body), images)
    return _with_images(request, images, images_max) if images else request


def _with_images(request: GenerationRequest, images: list[ImageInput], most: int) -> GenerationRequest:
    check_images(images, most)
    return replace(request, inputs=replace(request.inputs, images=tuple(images)))


def _with_conversation(
    request: GenerationRequest,
    body: ChatBody,
    card: ModelCard,
    choice: ToolChoice,
    images: list[ImageInput] | None = None,
) -> GenerationRequest:
    """Returns the request with the conversation and the inputs of the chat template.

    The images of the messages are appended to `images`; None: messages may not have images.
    """
    take_image = None if images is None else take_into(images)
    turns = body.messages
    if not card.takes_images and "tool" in map(_ROLE, turns or ()):
        turns = results_in_words(turns)
    messages = conversation.messages(turns, card.vocab_size, take_image)
    continued = bool(body.continue_final_message)
    if continued:
        if body.add_generation_prompt:
            refuse("continue_final_message", "cannot be true together with 'add_generation_prompt'")
        assert body.messages is not None
        conversation.check_continuable(body.messages[-1], len(messages) - 1)
    inputs = replace(
        request.inputs,
        messages=messages,
        # The chat template writes the special tokens itself.
        add_special_tokens=bool(body.add_special_tokens),
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
    )
    if choice.tools or body.documents or body.chat_template_kwargs or body.reasoning_effort is not None:
        documents, effort = checked_documents(body.documents), body.reasoning_effort
        variables = checked_template_kwargs(body.chat_template_kwargs, effort)
        inputs = replace(inputs, template_variables=template_variables(choice.tools, documents, variables))
    return replace(request, inputs=inputs)


def _check_forced(body: ChatBody, choice: ToolChoice, structure: Constraint | None) -> None:
    """Raises ServiceError for a structure besides forced calls. A format of the answer's text has no effect on them."""
    if structure is not None and body.response_format is None:
        refuse(choice.param, f"cannot force a call together with '{structure.param}'")
    if body.use_beam_search:
        refuse(choice.param, "cannot force a call together with 'use_beam_search'")


def asked_logprobs(body: ChatBody, most: int) -> int | None:
    """Returns the number of candidates to report with each token; None: no log probabilities. Raises ServiceError."""
    top = body.top_logprobs
    if top is not None and not 0 <= top <= most:
        refuse("top_logprobs", f"must be between 0 and {most}")
    if body.logprobs is None or body.logprobs is False:
        if top:
            refuse("top_logprobs", "needs 'logprobs' to be true")
        return None
    if body.logprobs is True:
        return top or 0
    most = min(most, limits.COMPLETION_LOGPROBS_MAX)
    if not 0 <= body.logprobs <= most:
        refuse("logprobs", f"must be true, false or between 0 and {most}")
    return body.logprobs if top is None else top


def _with_calls(
    request: GenerationRequest, choice: ToolChoice, card: ModelCard, settings: GatewaySettings
) -> GenerationRequest:
    """Returns the request with the structure of calls that are forced or strict. Raises ServiceError."""
    if choice.is_forced:
        return parameters.with_structure(request, forced_calls(choice, tool_format(choice, card, settings)))
    if choice.strict_param is None:
        return request
    structure = strict_calls(choice, tool_format(choice, card, settings), reasoning_format(card, settings))
    if structure is None:
        return request
    grammar = request.params.grammar
    if grammar is not None and grammar.kind != "structural_tag":
        return request  # The output has this structure from its first token on, so it has no calls.
    if grammar is not None:
        refuse(choice.strict_param, f"cannot be true together with '{request.pending.grammar_param}'")
    if request.params.beam is not None:
        refuse(choice.strict_param, "cannot be true together with 'use_beam_search'")
    return parameters.with_structure(request, structure)
