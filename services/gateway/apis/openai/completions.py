"""`POST /v1/completions`: the endpoint, and the conversion of its body to a `GenerationRequest`.

The conversion gives a request its defaults and checks it; every error names the parameter. `bodies.parameters` is the
part that chat and completions share.
"""

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai import schemas
from antiphon.services.gateway.apis.openai.answers.stream_encoder import OpenAIEncoder
from antiphon.services.gateway.apis.openai.bodies import parameters, request_fields
from antiphon.services.gateway.apis.openai.bodies.parameters import DEFAULTS, EndpointDefaults, RequestDefaults
from antiphon.services.gateway.apis.openai.request_context import Arrival
from antiphon.services.gateway.apis.openai.schemas import CompletionBody
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.shared import limits
from antiphon.shared.request import checks
from antiphon.shared.request.checks import given, refuse

MAX_TOKENS = 16
"""Default of `max_tokens`."""


class CompletionEndpoint:
    """The endpoint that continues texts."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def completions(self, request: Request) -> Response:
        """Continues a text, or each of several texts. Raises ServiceError."""
        arrival, serving = Arrival.of(request), self._serving
        data = request.state.body = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.COMPLETION_DECODER)
        card = serving.backend.resolve_model(body.model)
        converted = completion_request(body, card, request.state.request_id, serving.defaults_of(request))
        context = await serving.context_of("completion", arrival, card, converted, body)
        return await serving.answer(request, context, OpenAIEncoder(context))


def completion_request(
    body: CompletionBody, card: ModelCard, request_id: str, defaults: RequestDefaults = DEFAULTS
) -> GenerationRequest:
    """Returns the request of `/v1/completions`. Raises ServiceError naming the first parameter that is wrong."""
    texts, token_ids = parameters.prompts(body.prompt, card.vocab_size)
    logprobs = body.logprobs
    most = min(defaults.max_logprobs, limits.COMPLETION_LOGPROBS_MAX)
    if logprobs is not None and not 0 <= logprobs <= most:
        refuse("logprobs", f"must be between 0 and {most}")
    suffix = given(body.suffix, "")
    prompt_logprobs = checks.prompt_logprobs(body.prompt_logprobs, defaults.max_logprobs)
    if body.echo and logprobs is not None:
        if body.use_beam_search:
            refuse("echo", "with 'logprobs' must be false with 'use_beam_search'")
        if suffix:
            refuse("suffix", "cannot be given together with 'echo' and 'logprobs'")
        prompt_logprobs = max(logprobs, given(prompt_logprobs, 0))
    if suffix and token_ids:
        refuse("suffix", "needs a 'prompt' that is text")
    if suffix and body.truncate_prompt_tokens is not None:
        refuse("truncate_prompt_tokens", "cannot be given together with 'suffix'")
    endpoint = EndpointDefaults(MAX_TOKENS, 1.0, may_only_echo=bool(body.echo))
    params = parameters.checked_params(body, card, endpoint, (logprobs, prompt_logprobs), defaults.draw_seed)
    request = parameters.checked_request(body, card, request_id, params, len(texts) + len(token_ids))
    if (structure := parameters.structure_of(body)) is not None:
        request = parameters.with_structure(request, structure)
    return replace(
        request,
        inputs=replace(
            request.inputs,
            texts=texts,
            token_ids=token_ids,
            suffix=suffix,
            add_special_tokens=given(body.add_special_tokens, True),
        ),
        output=replace(request.output, only_echoes=parameters.only_echoes(body)),
    )
