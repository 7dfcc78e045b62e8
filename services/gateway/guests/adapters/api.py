"""The endpoints `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, with the bodies and answers of vLLM.

With API keys they need the scope `admin`, because the client names a directory on the machines of the engines.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.guests.adapters.guest import AdapterDirectory
from antiphon.shared.errors import ServiceError


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


_LOAD, _UNLOAD = msgspec.json.Decoder(LoadLoraBody), msgspec.json.Decoder(UnloadLoraBody)


class TheApi(Api):
    """See Api. Without the guest there are no adapters to load."""

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        directory = serving.guests.offered(AdapterDirectory)
        if directory is not None:
            self._backend, self._directory = serving.backend, directory
            routes.post("/v1/load_lora_adapter", self.load, Body(LoadLoraBody))
            routes.post("/v1/unload_lora_adapter", self.unload, Body(UnloadLoraBody))

    async def load(self, request: Request) -> Response:
        """Loads an adapter on all engines. After the answer, requests may name the adapter."""
        body = await _read(request, _LOAD)
        for name, value in (("lora_name", body.lora_name), ("lora_path", body.lora_path)):
            if not value:
                raise ServiceError("missing_required_parameter", f"'{name}' must not be empty.", param=name)
        base = self._backend.resolve_model(body.base_model_name).served_by
        await self._directory.load(body.lora_name, body.lora_path, base, in_place=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Unloads an adapter. Running requests finish with it."""
        body = await _read(request, _UNLOAD)
        models = dict.fromkeys(card.served_by for card in self._backend.models() if not card.base)
        await self._directory.unload(body.lora_name, list(models))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _read(request: Request, decoder: "msgspec.json.Decoder[request_fields.T]") -> request_fields.T:
    data = await request_body.read(request.scope["headers"], request.receive)
    return request_fields.read(data, decoder)
