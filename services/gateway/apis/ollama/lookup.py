"""Reads the bodies of Ollama's API and finds the models that they name."""

import msgspec
from starlette.requests import Request

from antiphon.services.gateway.apis.ollama.models import DEFAULT_TAG
from antiphon.services.gateway.apis.ollama.schemas import RULES
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.bodies.request_fields import FieldRules, T
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.path.generation import Backend, ModelCard
from antiphon.shared.errors import ServiceError


async def read(request: Request, decoder: "msgspec.json.Decoder[T]", rules: FieldRules = RULES) -> T:
    """Returns the body of a request. Raises ServiceError."""
    data = await request_body.read(request.scope["headers"], request.receive)
    return request_fields.read(data, decoder, rules)


def find(backend: Backend, name: str | None) -> ModelCard:
    """Returns the model with this name. If there is none, tries the name without the default tag."""
    try:
        return backend.resolve_model(name)
    except ServiceError as error:
        if error.code != "model_not_found" or name is None or not name.endswith(DEFAULT_TAG):
            raise
    return backend.resolve_model(name.removesuffix(DEFAULT_TAG))
