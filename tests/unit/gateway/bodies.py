"""Shorthands for the tests of request bodies."""

import json
from typing import Any

import pytest

from antiphon.services.gateway.apis.openai import schemas
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.chat import generation_request
from antiphon.services.gateway.apis.openai.completions import completion_request
from antiphon.services.gateway.edge.access.call import Call, Strictness, serving
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.shared.errors import ServiceError

CARD = ModelCard(name="toy", path="/models/toy", max_model_len=512, vocab_size=300, created=1)
STRICT = Strictness(unknown_fields=True, long_outputs=True)
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> GenerationRequest:
    """A completion request as the edge reads it. `prompt` has a default."""
    data = json.dumps({"prompt": "hello", **fields}).encode()
    with serving(Call(strict=STRICT)):
        return completion_request(request_fields.read(data, schemas.COMPLETION_DECODER), CARD, "r" * 22)


def chat(**fields: Any) -> GenerationRequest:
    """A chat request as the edge reads it. `messages` has a default."""
    data = json.dumps({"messages": HELLO, **fields}).encode()
    with serving(Call(strict=STRICT)):
        return generation_request(request_fields.read(data, schemas.CHAT_DECODER), CARD, "r" * 22)


def lenient(read: Any, **fields: Any) -> tuple[GenerationRequest, list[str]]:
    """A request as a server without the strict modes reads it, and the fields that it tells as ignored."""
    call = Call()
    with serving(call):
        decoder: Any = schemas.CHAT_DECODER if read is chat else schemas.COMPLETION_DECODER
        given = {"messages": HELLO} if read is chat else {"prompt": "hello"}
        body: Any = request_fields.read(json.dumps({**given, **fields}).encode(), decoder)
        made = generation_request(body, CARD, "r" * 22) if read is chat else completion_request(body, CARD, "r" * 22)
    return made, [*call.ignored]


def refusal(read: Any, code: str, param: str, **fields: Any) -> ServiceError:
    """The error with which a body is refused, checked for code, parameter and a message that names it."""
    with pytest.raises(ServiceError) as raised:
        read(**fields)
    error = raised.value
    assert (error.code, error.param) == (code, param), error.message
    assert param.split(".")[-1].split("[")[0] in error.message
    return error
