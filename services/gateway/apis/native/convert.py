"""Converts the bodies of `/generate` to `GenerationRequest`, by way of OpenAI's bodies. Errors name the field. Pure.

`openai.bodies.parameters` checks the sampling parameters and limits, so that they are the same for all APIs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from antiphon.services.gateway.apis.native.schemas import EngineBody, EngineSampling, GenerateBody
from antiphon.services.gateway.apis.openai import completions
from antiphon.services.gateway.apis.openai.bodies.parameter_names import in_names
from antiphon.services.gateway.apis.openai.bodies.parameters import RequestDefaults
from antiphon.services.gateway.apis.openai.body import SamplingFields
from antiphon.services.gateway.apis.openai.chat import generation_request
from antiphon.services.gateway.apis.openai.completions import completion_request
from antiphon.services.gateway.apis.openai.schemas import ChatBody, CompletionBody
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import check_token_ids, check_token_ids_len, given, missing, preprocess_s, refuse
from antiphon.shared.request.choices import check_num_sequences
from antiphon.shared.request.conversation import Turn, turns_of_history, with_system

Conversation = list[Turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """Fields of a body in the engine form that the response repeats, or from which its metrics are computed.

    `received_at` is the Unix time at which this server got the request. `preprocess_s` is the time that the client
    spent on preprocessing, None if it does not say.
    """

    answer_id: str
    prompt: str | None
    received_at: float
    arrival_time: float
    preprocess_s: float | None


def text_request(body: GenerateBody, card: ModelCard, request_id: str, defaults: RequestDefaults) -> GenerationRequest:
    """Returns the `GenerationRequest` for a `GenerateBody`. Raises ServiceError."""
    if body.detokenize is False:
        refuse("detokenize", "must be true, because the answer is text: give 'sampling_params' to get token ids")
    fields = {**_sampling_fields(body), "prompt": body.prompt, "suffix": body.suffix, "stream": body.stream}
    return completion_request(CompletionBody(**fields), card, request_id, defaults)


def engine_request(body: EngineBody, card: ModelCard, request_id: str, defaults: RequestDefaults) -> GenerationRequest:
    """Returns the `GenerationRequest` for an `EngineBody`. `request_id` is the server's own id. Raises ServiceError."""
    fields = _engine_fields(body)
    if (found := _conversations(body)) is not None:
        return _chat_request(found, fields, card, request_id, defaults)
    ids = body.prompt_token_ids
    check_token_ids_len(body.prompt_token_ids_len, ids)
    if ids is not None:
        check_token_ids(ids, card.vocab_size, "prompt_token_ids")
        return completion_request(CompletionBody(prompt=list(ids), **fields), card, request_id, defaults)
    if body.prompt is None:
        message = "Missing required parameter: 'prompt'. Give 'prompt', 'prompt_token_ids' or 'messages'."
        raise ServiceError("missing_required_parameter", message, param="prompt")
    return completion_request(CompletionBody(prompt=body.prompt, **fields), card, request_id, defaults)


def client_facts(body: EngineBody, answer_id: str, received_at: float) -> ClientFacts:
    """Returns the client's values for the answer. `answer_id`: the id that the answer has."""
    arrived = given(body.arrival_time, received_at)
    if arrived < 0:
        refuse("arrival_time", "must not be negative")
    return ClientFacts(
        answer_id=answer_id,
        prompt=body.prompt,
        received_at=received_at,
        arrival_time=arrived,
        preprocess_s=preprocess_s(body.preprocess_start_time, body.preprocess_end_time),
    )


def _sampling_fields(body: SamplingFields) -> dict[str, Any]:
    return {name: getattr(body, name) for name in SamplingFields.__struct_fields__}


def _engine_fields(body: EngineBody) -> dict[str, Any]:
    sampling = body.sampling_params or EngineSampling()
    fields = {
        **_sampling_fields(sampling),
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "stream": body.stream,
    }
    if body.eos_token_ids is not None:
        if sampling.eos_token_ids is not None:
            refuse("eos_token_ids", "is given twice: leave it out here or in 'sampling_params'")
        fields["eos_token_ids"] = body.eos_token_ids
    return fields


def _chat_request(
    conversations: Sequence[Conversation],
    fields: dict[str, Any],
    card: ModelCard,
    request_id: str,
    defaults: RequestDefaults,
) -> GenerationRequest:
    fields["max_tokens"] = given(fields["max_tokens"], completions.MAX_TOKENS)
    fields["temperature"] = given(fields["temperature"], 1.0)
    requests: list[GenerationRequest] = []
    for number, turns in enumerate(conversations):
        with _conversation_named(number if len(conversations) > 1 else None):
            requests.append(generation_request(ChatBody(messages=turns, **fields), card, request_id, defaults))
        # All conversations sample with the seed drawn for the first one, like the prompts of one request.
        fields["seed"] = requests[0].params.seed
    first = requests[0]
    if len(requests) == 1:
        return first
    for number, one in enumerate(requests):
        for image in one.inputs.images:
            param = image.param.replace("messages", f"messages[{number}]", 1)
            refuse(param, "is an image, which only a single conversation may have: send one conversation")
    check_num_sequences(first.n, first.num_sequences, len(requests))
    conversations_of = tuple(one.inputs.messages for one in requests)
    return replace(first, inputs=replace(first.inputs, messages=(), conversations=conversations_of))


def _conversations(body: EngineBody) -> list[Conversation] | None:
    """Returns the conversations of a request, None if its input is a prompt."""
    if body.messages is not None:
        for name in ("prompt", "prompt_token_ids", "prompt_token_ids_len", "history"):
            if getattr(body, name) is not None:
                refuse(name, "cannot be given together with 'messages'")
        return [with_system(body.system, one) for one in _batch(body.messages)]
    if body.history is None and body.system is None:
        return None
    if body.prompt_token_ids is not None:
        refuse("prompt_token_ids", "cannot be given together with 'history' or 'system'")
    if body.prompt is None:
        missing("prompt")
    return [with_system(body.system, turns_of_history(body.history or (), body.prompt))]


def _batch(messages: Sequence[Turn | list[Turn]]) -> list[Conversation]:
    alone = [one for one in messages if isinstance(one, Turn)]
    several = [one for one in messages if not isinstance(one, Turn)]
    if alone and several:
        refuse("messages", "must hold only messages or only conversations")
    if len(several) > limits.CONVERSATIONS_MAX:
        refuse("messages", f"must hold at most {limits.CONVERSATIONS_MAX} conversations")
    return several or [alone]


@contextmanager
def _conversation_named(number: int | None) -> Iterator[None]:
    """Adds the conversation's number to the name of the field in an error: `messages[1][0].role`."""
    try:
        yield
    except ServiceError as error:
        if number is None or not error.param.startswith("messages"):
            raise
        raise in_names(error, {error.param: error.param.replace("messages", f"messages[{number}]", 1)}) from None
