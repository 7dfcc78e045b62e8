"""The endpoints `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, with the bodies and answers of vLLM.

With API keys they need the scope `admin`, because the client names a directory on the machines of the engines.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from services.gateway.generation import Backend
from services.gateway.http import request_body
from services.gateway.openai.bodies import unsupported_params
from services.gateway.openai.body import read_body, read_fields
from services.gateway.openai.openapi import Body
from shared.errors import ServiceError


class LoadLoraBody(msgspec.Struct, kw_only=True):
    """Body of `/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str
    """Directory of the adapter, as the engines see it."""
    load_inplace: bool | None = None
    """Whether the adapter replaces one that has the same name. Default: no."""
    base_model_name: str | None = None
    """The model that the adapter belongs to. Default: the model of requests that name none."""


class UnloadLoraBody(msgspec.Struct, kw_only=True):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None
    """Accepted because clients of other servers send it; adapters are named by `lora_name` alone."""


BODIES = {"/v1/load_lora_adapter": Body(LoadLoraBody), "/v1/unload_lora_adapter": Body(UnloadLoraBody)}
_LOAD, _UNLOAD = msgspec.json.Decoder(LoadLoraBody), msgspec.json.Decoder(UnloadLoraBody)


class AdapterEndpoints:
    """The endpoints that load and unload LoRA adapters."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def load(self, request: Request) -> Response:
        """Loads an adapter on all engines. After the answer, requests may name the adapter."""
        body = read_body(await _checked(request, LoadLoraBody), _LOAD)
        for name, value in (("lora_name", body.lora_name), ("lora_path", body.lora_path)):
            if not value:
                raise ServiceError("missing_required_parameter", f"'{name}' must not be empty.", param=name)
        await self._backend.load_adapter(
            body.lora_name, body.lora_path, body.base_model_name, in_place=bool(body.load_inplace)
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Unloads an adapter. Running requests finish with it."""
        body = read_body(await _checked(request, UnloadLoraBody), _UNLOAD)
        await self._backend.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _checked(request: Request, body: type[msgspec.Struct]) -> bytes:
    data = await request_body.read(request.scope["headers"], request.receive)
    unsupported_params.check(read_fields(data), body)
    return data
