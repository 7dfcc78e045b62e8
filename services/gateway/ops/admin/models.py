"""The endpoints of `/admin/models`: list models, start a model or a version, roll back, shadow, unload."""

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.listing import check_query
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import NOT_KEPT, json_response
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.path.generation import Backend
from antiphon.services.gateway.path.guest import Guests
from antiphon.services.gateway.path.models.versions import VersionDirectory
from antiphon.shared import limits
from antiphon.shared.deployment.model_versions import ModelState
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChangeModel
from antiphon.shared.request.checks import given, refuse
from antiphon.shared.settings.allowed_values import MODEL_NAME

B = TypeVar("B", bound=msgspec.Struct)


class SetModelBody(msgspec.Struct, kw_only=True):
    """Body of `POST /admin/models`."""

    model: str
    directory: str
    """Directory or hub name of the new model or version, as the launcher sees it."""
    settings: dict[str, Any] | None = None
    """Settings of a new model, as in a file of models. Default: those of the server."""
    load: bool | None = None
    """Whether it is a new model (true) or a new version of one that is served (false). Default: what the name says."""


class ShadowBody(msgspec.Struct, kw_only=True):
    """Body of `POST /admin/models/shadow`."""

    model: str
    directory: str | None = None
    """Directory or hub name of the shadow version. Default: the running shadow version is stopped."""
    share: float | None = None
    """Share of the requests that are copied to the shadow version. Default: 0.05."""


class RollbackBody(msgspec.Struct, kw_only=True):
    """Body of `POST /admin/models/rollback`."""

    model: str


DEFAULT_SHARE = 0.05


class ModelEndpoints:
    """The endpoints of one gateway. `versions` is None for a gateway without a bus.

    `guests` know more of versions, such as the results of shadow requests. `backend` knows the names that are taken.
    """

    def __init__(self, versions: VersionDirectory | None, guests: Guests, backend: Backend) -> None:
        self._given, self._guests, self._backend = versions, guests, backend

    def add(self, routes: Routes) -> None:
        """Adds the routes."""
        routes.get("/admin/models", self.list)
        routes.post("/admin/models", self.set, Body(SetModelBody))
        routes.post("/admin/models/rollback", self.roll_back, Body(RollbackBody))
        routes.post("/admin/models/shadow", self.shadow, Body(ShadowBody))
        routes.delete("/admin/models/{name:path}", self.unload)

    async def list(self, request: Request) -> Response:
        """Lists the models that orders have changed, with their versions."""
        check_query(request, ())
        models = () if self._given is None else self._given.states.models
        return json_response({"object": "list", "data": [self._facts(one) for one in models]}, headers=NOT_KEPT)

    async def set(self, request: Request) -> Response:
        """Starts a new version of a model, or another model. When it is ready, it gets all new requests."""
        body = await _read(request, SetModelBody)
        if not body.directory:
            refuse("directory", "must not be empty")
        is_served = self._is_served(body.model)
        if not given(body.load, not is_served):
            if body.settings:
                refuse("settings", "are those of a new model; a new version has the settings of its model")
            return await self._order(ChangeModel(action="set", model=body.model, directory=body.directory))
        if is_served:
            refuse("model", f"must be a new name: {body.model!r} is served already")
        settings = _settings(body)
        order = ChangeModel(action="load", model=body.model, directory=body.directory, settings=settings)
        return await self._order(order)

    async def unload(self, request: Request, name: str) -> Response:
        """Withdraws a model from clients at once. Its processes end when they have no requests."""
        check_query(request, ())
        return await self._order(ChangeModel(action="unload", model=name))

    async def roll_back(self, request: Request) -> Response:
        """Makes the former version, which must still be running, active again for new requests."""
        return await self._order(ChangeModel(action="rollback", model=(await _read(request, RollbackBody)).model))

    async def shadow(self, request: Request) -> Response:
        """Starts or stops a shadow version, which computes copies of a share of the requests."""
        body = await _read(request, ShadowBody)
        share = given(body.share, DEFAULT_SHARE)
        if not 0 < share <= 1:
            refuse("share", "must be above 0 and at most 1")
        if not body.directory:
            return await self._order(ChangeModel(action="unshadow", model=body.model))
        order = ChangeModel(action="shadow", model=body.model, directory=body.directory, share=share)
        return await self._order(order)

    def _is_served(self, name: str) -> bool:
        """Whether requests can use the name: of a model, of an adapter, or a further name of one of them."""
        try:
            self._backend.resolve_model(name)
        except ServiceError as error:
            return error.code != "model_not_found"
        return True

    async def _order(self, order: ChangeModel) -> Response:
        if self._given is None:
            raise ServiceError("not_found", "This gateway has no bus.")
        await self._given.order(order)
        state = self._given.states.find(order.model)
        return json_response({"object": "model"} if state is None else self._facts(state), headers=NOT_KEPT)

    def _facts(self, state: ModelState) -> dict[str, Any]:
        return _facts(state, self._guests)


def _settings(body: SetModelBody) -> bytes:
    if not body.model or not MODEL_NAME.holds(body.model):
        refuse("model", f"must be {MODEL_NAME.text}" if body.model else "must not be empty")
    if "model" in (body.settings or {}):
        refuse("settings", "must not have 'model': the field 'directory' names it")
    settings = msgspec.json.encode({**(body.settings or {}), "model": body.directory})
    if len(settings) > limits.MODEL_SETTINGS_BYTES_MAX:
        refuse("settings", f"must have at most {limits.MODEL_SETTINGS_BYTES_MAX} bytes")
    return settings


async def _read(request: Request, body: type[B]) -> B:
    check_query(request, ())
    data = await request_body.read(request.scope["headers"], request.receive)
    return request_fields.read(data, msgspec.json.Decoder(body), request_fields.OWN)


def _facts(state: ModelState, guests: Guests) -> dict[str, Any]:
    return {
        "object": "model",
        "id": state.name,
        "active": state.active or None,
        "former": state.former or None,
        "settings": msgspec.json.decode(state.settings) if state.settings else None,
        "versions": [
            {
                "number": one.number,
                "directory": one.directory,
                "state": one.state,
                "created": one.created,
                "reason": one.reason or None,
                "shadow_share": one.share or None,
                "copies": guests.version_facts(state.name, one.number),
            }
            for one in state.versions
        ],
    }
