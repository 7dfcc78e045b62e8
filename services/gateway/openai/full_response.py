"""Encodes whole answers as JSON: completions, chat completions and model cards. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.generation import ModelCard
from services.gateway.openai.chat_message import MessageEncoder
from services.gateway.openai.choices import Choice, ChoiceAccumulator
from services.gateway.openai.logprobs import chat_logprobs, completion_logprobs
from services.gateway.openai.request_context import RequestContext, system_fingerprint

OBJECT = {"completion": "text_completion", "chat": "chat.completion"}


def answer(
    context: RequestContext,
    accumulator: ChoiceAccumulator,
    num_prompt_tokens: int,
    timings: dict[str, Any] | None = None,
) -> bytes:
    """Returns the response body of a finished generation. `timings`: the times of its phases, if it has them."""
    choices = [_choice(context, choice) for choice in accumulator.choices]
    body = {
        "id": context.id,
        "object": OBJECT[context.kind],
        "created": context.arrival.created,
        "model": context.card.name,
        "system_fingerprint": system_fingerprint(context.card),
        "choices": choices,
        "usage": accumulator.usage(num_prompt_tokens),
        "sentence_length": choices[0]["sentence_length"],
        "cum_log_probs": choices[0]["cum_log_probs"],
        **({} if timings is None else {"timings": timings}),
    }
    return msgspec.json.encode(body)


def model_list(cards: Sequence[ModelCard]) -> bytes:
    """Returns the response body of `GET /v1/models`."""
    return msgspec.json.encode({"object": "list", "data": [_model(card) for card in cards]})


def model(card: ModelCard) -> bytes:
    """Returns the response body of `GET /v1/models/{id}`."""
    return msgspec.json.encode(_model(card))


def _choice(context: RequestContext, choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        **_output(context, choice),
        **({} if choice.token_ids is None else {"token_ids": choice.token_ids}),
        "logprobs": _logprobs(context, choice),
        "finish_reason": finish_reason(context, choice),
        "stop_reason": choice.stop_reason,
        "sentence_length": len(context.echo(choice.index)) + choice.num_characters,
        "cum_log_probs": choice.cumulative_logprob,
    }


def finish_reason(context: RequestContext, choice: Choice) -> str | None:
    """Returns the finish reason to report for a choice that has ended."""
    if context.answer_format is None or choice.parser is None or choice.finish_reason is None:
        return choice.finish_reason
    return context.answer_format.finish_reason(choice.finish_reason, choice.parser)


def _output(context: RequestContext, choice: Choice) -> dict[str, Any]:
    echo = context.echo(choice.index)
    if context.answer_format is not None:
        encoder = MessageEncoder(context.answer_format, context.request.request_id)
        return {"message": encoder.message(choice.index, choice.events, echo)}
    text = echo + "".join(choice.text)
    return {"text": text} if context.kind == "completion" else {"message": {"role": "assistant", "content": text}}


def _logprobs(context: RequestContext, choice: Choice) -> dict[str, Any] | None:
    if context.request.params.logprobs is None:
        return None
    if context.kind == "completion":
        return completion_logprobs(choice.logprobs, 0, as_ids=context.tokens_as_ids)[0]
    return chat_logprobs(choice.logprobs, as_ids=context.tokens_as_ids)


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "antiphon",
        "root": card.path,
        "parent": None,
        "max_model_len": card.max_model_len,
        "permission": [],
    }
