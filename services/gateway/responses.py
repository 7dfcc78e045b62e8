"""Whole answers: the JSON of completions, chat completions and model cards. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.exchange import Exchange, system_fingerprint
from services.gateway.generation import ModelCard
from services.gateway.logprobs import chat_logprobs, completion_logprobs
from services.gateway.tally import Choice, Tally

OBJECT = {"completion": "text_completion", "chat": "chat.completion"}


def answer(exchange: Exchange, tally: Tally, num_prompt_tokens: int) -> bytes:
    """The body of a finished generation."""
    choices = [_choice(exchange, choice) for choice in tally.choices]
    body = {
        "id": exchange.id,
        "object": OBJECT[exchange.kind],
        "created": exchange.arrival.created,
        "model": exchange.card.name,
        "system_fingerprint": system_fingerprint(exchange.card),
        "choices": choices,
        "usage": tally.usage(num_prompt_tokens),
        "sentence_length": choices[0]["sentence_length"],
        "cum_log_probs": choices[0]["cum_log_probs"],
    }
    return msgspec.json.encode(body)


def model_list(cards: Sequence[ModelCard]) -> bytes:
    """The body of `GET /v1/models`."""
    return msgspec.json.encode({"object": "list", "data": [_model(card) for card in cards]})


def model(card: ModelCard) -> bytes:
    """The body of `GET /v1/models/{id}`."""
    return msgspec.json.encode(_model(card))


def _choice(exchange: Exchange, choice: Choice) -> dict[str, Any]:
    text = exchange.echo(choice.index) + "".join(choice.text)
    said = {"text": text} if exchange.kind == "completion" else {"message": {"role": "assistant", "content": text}}
    return {
        "index": choice.index,
        **said,
        **({} if choice.token_ids is None else {"token_ids": choice.token_ids}),
        "logprobs": _logprobs(exchange, choice),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "sentence_length": len(text),
        "cum_log_probs": choice.cumulative_logprob,
    }


def _logprobs(exchange: Exchange, choice: Choice) -> dict[str, Any] | None:
    if exchange.request.params.logprobs is None:
        return None
    if exchange.kind == "completion":
        return completion_logprobs(choice.logprobs, 0)[0]
    return chat_logprobs(choice.logprobs)


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
