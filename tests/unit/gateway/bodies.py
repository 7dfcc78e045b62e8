"""Shorthands for the tests of request bodies."""

import json
from typing import Any

import pytest

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.openai import schemas
from services.gateway.openai.bodies import unsupported_params
from services.gateway.openai.body import read_body, read_fields
from services.gateway.openai.chat import generation_request
from services.gateway.openai.completions import completion_request
from shared.errors import ServiceError

CARD = ModelCard(name="toy", path="/models/toy", max_model_len=512, vocab_size=300, created=1)
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> GenerationRequest:
    """A completion request as the edge reads it. `prompt` has a default."""
    data = json.dumps({"prompt": "hello", **fields}).encode()
    unsupported_params.check(read_fields(data), schemas.CompletionBody)
    return completion_request(read_body(data, schemas.COMPLETION_DECODER), CARD, "r" * 22)


def chat(**fields: Any) -> GenerationRequest:
    """A chat request as the edge reads it. `messages` has a default."""
    data = json.dumps({"messages": HELLO, **fields}).encode()
    unsupported_params.check(read_fields(data), schemas.ChatBody)
    return generation_request(read_body(data, schemas.CHAT_DECODER), CARD, "r" * 22)


def refusal(read: Any, code: str, param: str, **fields: Any) -> ServiceError:
    """The error with which a body is refused, checked for code, parameter and a message that names it."""
    with pytest.raises(ServiceError) as raised:
        read(**fields)
    error = raised.value
    assert (error.code, error.param) == (code, param), error.message
    assert param.split(".")[-1].split("[")[0] in error.message
    return error
