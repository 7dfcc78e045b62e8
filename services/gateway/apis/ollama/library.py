"""The endpoints of Ollama's API that manage a library of models. There is none here, so they say what to do instead.

Models are chosen when the server starts, or by `antiphon models set`. Clients pull a model before they use it, so a
pull of a model that is served succeeds, and says that nothing was downloaded.
"""

from typing import NoReturn

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.ollama import models, schemas
from antiphon.services.gateway.apis.ollama.encoder import CONTENT_TYPE
from antiphon.services.gateway.apis.ollama.lookup import find, read
from antiphon.services.gateway.edge.http.json_response import json_response
from antiphon.services.gateway.path.generation import Backend
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import given

_CHOSEN = (
    "models are chosen when the server starts ('antiphon serve --model NAME'), or later by 'antiphon models set', "
    "not by requests"
)


class OllamaLibraryEndpoints:
    """The endpoints that list models, and those that would change the list."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def tags(self) -> Response:
        """Lists the models that can be used now."""
        return json_response(models.tags(self._backend.models()))

    async def ps(self) -> Response:
        """Lists the models that are loaded: all that can be used."""
        return json_response(models.running(self._backend.models()))

    async def version(self) -> Response:
        """Answers with the version of Ollama's API that is spoken, and that of this software."""
        return json_response(models.version())

    async def pull(self, request: Request) -> Response:
        """Answers that a model is there. Raises ServiceError('model_not_found') for any other."""
        body = await read(request, schemas.MODEL_DECODER, schemas.MANAGE_RULES)
        self._check(given(body.model, body.name), "cannot be downloaded")
        states = [{"status": "nothing to download: the model is served here"}, {"status": "success"}]
        if not given(body.stream, True):
            return json_response(states[-1])
        lines = b"".join(msgspec.json.encode(state) + b"\n" for state in states)
        return Response(lines, media_type=CONTENT_TYPE.decode())

    async def push(self, request: Request) -> Response:
        """Raises ServiceError: models are not published."""
        body = await read(request, schemas.MODEL_DECODER, schemas.MANAGE_RULES)
        self._check(given(body.model, body.name), "cannot be pushed")
        _refuse("Models cannot be pushed from this server: publish the model's files where you got them.")

    async def delete(self, request: Request) -> Response:
        """Raises ServiceError: a model that is served stays."""
        body = await read(request, schemas.MODEL_DECODER, schemas.MANAGE_RULES)
        self._check(given(body.model, body.name), "cannot be deleted")
        _refuse(f"Models cannot be deleted: {_CHOSEN}.")

    async def copy(self, request: Request) -> Response:
        """Raises ServiceError: names are given when the server starts."""
        body = await read(request, schemas.COPY_DECODER, schemas.MANAGE_RULES)
        self._check(body.source, "cannot be copied")
        _refuse("Models cannot be copied: start the server with --served-model-alias to give a model further names.")

    async def create(self, request: Request) -> Response:
        """Raises ServiceError: models are not made from a Modelfile."""
        await read(request, schemas.MODEL_DECODER, schemas.MANAGE_RULES)
        _refuse(
            f"Models cannot be created: {_CHOSEN}. Send a system prompt and options with each request; load a LoRA "
            "adapter by /v1/load_lora_adapter."
        )

    def _check(self, name: str | None, fate: str) -> None:
        """Raises ServiceError if there is no model of this name. `fate`: what happens to it therefore."""
        if not name:
            raise ServiceError("missing_required_parameter", "Missing required parameter: 'model'.", param="model")
        try:
            find(self._backend, name)
        except ServiceError as error:
            if error.code != "model_not_found":
                raise
            message = f"{error.message} It {fate}: {_CHOSEN}."
            raise ServiceError(error.code, message, param=error.param) from None


def _refuse(message: str) -> NoReturn:
    raise ServiceError("unsupported_parameter", message)
