"""Encodes whole answers as JSON: completions, chat completions and model cards. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.answers.chat_message import MessageEncoder
from antiphon.services.gateway.apis.openai.answers.choices import Choice, ChoiceAccumulator
from antiphon.services.gateway.apis.openai.answers.logprobs import (
    chat_logprobs,
    completion_logprobs,
    limited,
    prompt_logprobs,
)
from antiphon.services.gateway.apis.openai.request_context import RequestContext, system_fingerprint
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared.messages import PositionLogprobs

OBJECT = {"completion": "text_completion", "chat": "chat.completion"}


def answer(
    context: RequestContext,
    accumulator: ChoiceAccumulator,
    num_prompt_tokens: int,
    timings: dict[str, Any] | None = None,
    prompt_token_ids: Sequence[list[int]] = (),
) -> bytes:
    """Returns the response body of a finished generation.

    `timings`: the field of the same name, if the request asks for it. `prompt_token_ids`: of each prompt, in the same
    case.
    """
    choices = [_choice(context, choice, accumulator) for choice in accumulator.choices]
    if prompt_token_ids and context.kind == "completion":
        for choice in choices:
            choice["prompt_token_ids"] = prompt_token_ids[context.prompt_of(choice["index"])]
    body: dict[str, Any] = {
        "id": context.id,
        "object": OBJECT[context.kind],
        "created": context.arrival.created,
        "model": context.card.name,
        "system_fingerprint": system_fingerprint(context.card),
        **context.tier,
        "choices": choices,
        "usage": accumulator.usage(num_prompt_tokens),
        "sentence_length": choices[0]["sentence_length"],
        "cum_log_probs": choices[0]["cum_log_probs"],
        **({} if timings is None else {"timings": timings}),
    }
    if context.kind == "chat":
        body |= _prompt_logprobs(context, accumulator, 0)
        body |= {"prompt_token_ids": prompt_token_ids[0]} if prompt_token_ids else {}
    return msgspec.json.encode(body)


def model_list(cards: Sequence[ModelCard]) -> bytes:
    """Returns the response body of `GET /v1/models`."""
    return msgspec.json.encode({"object": "list", "data": [_model(card) for card in cards]})


def model(card: ModelCard) -> bytes:
    """Returns the response body of `GET /v1/models/{id}`."""
    return msgspec.json.encode(_model(card))


def _choice(context: RequestContext, choice: Choice, accumulator: ChoiceAccumulator) -> dict[str, Any]:
    completes, prompt = context.kind == "completion", context.prompt_of(choice.index)
    return {
        "index": choice.index,
        **_output(context, choice),
        **({} if choice.token_ids is None else {"token_ids": choice.token_ids}),
        "logprobs": _logprobs(context, choice, accumulator.prompts[prompt]),
        **(_prompt_logprobs(context, accumulator, prompt) if completes else {}),
        "finish_reason": choice.reason_in(context.answer_format),
        "stop_reason": choice.stop_reason,
        "sentence_length": len(context.echo(choice.index)) + choice.num_characters,
        "cum_log_probs": choice.cumulative_logprob,
    }


def _output(context: RequestContext, choice: Choice) -> dict[str, Any]:
    echo = context.echo(choice.index)
    if context.answer_format is not None:
        encoder = MessageEncoder(context.answer_format, context.request.request_id)
        return {"message": encoder.message(choice.index, choice.events, echo)}
    text = echo + "".join(choice.text)
    return {"text": text} if context.kind == "completion" else {"message": {"role": "assistant", "content": text}}


def _logprobs(context: RequestContext, choice: Choice, prompt: list[PositionLogprobs]) -> dict[str, Any] | None:
    num_top = context.request.params.logprobs
    if num_top is None:
        return None
    if context.kind == "chat":
        return chat_logprobs(choice.logprobs, as_ids=context.tokens_as_ids)
    before = limited(prompt, num_top) if context.echoes_logprobs else []
    return completion_logprobs([*before, *choice.logprobs], 0, as_ids=context.tokens_as_ids)[0]


def _prompt_logprobs(context: RequestContext, accumulator: ChoiceAccumulator, prompt: int) -> dict[str, Any]:
    """Returns the field `prompt_logprobs` of an answer, if the request asks for it."""
    if context.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(accumulator.prompts[prompt], context.prompt_logprobs)}


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "antiphon",
        "root": card.path,
        "parent": card.base or None,
        "max_model_len": card.max_model_len,
        "tasks": _tasks(card),
        "input_modalities": ["text", "image"] if card.takes_images else ["text"],
        "permission": [],
    }


def _tasks(card: ModelCard) -> list[str]:
    """Returns the tasks that the model supports: `generate`, `embed`, `classify`, `score`."""
    if card.labels:
        return ["classify", "score"] if len(card.labels) == 1 else ["classify"]
    return ["generate"] * card.generates + ["embed", "score"] * bool(card.embedding_size)
