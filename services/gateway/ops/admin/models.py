"""The endpoints `GET /admin/models`, `POST /admin/models` (a new version), `…/rollback` and `…/shadow`."""

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
from antiphon.services.gateway.path.guest import Guests
from antiphon.services.gateway.path.models.versions import VersionDirectory
from antiphon.shared.deployment.model_versions import ModelState
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChangeModel
from antiphon.shared.request.checks import given, refuse

B = TypeVar("B", bound=msgspec.Struct)


class SetModelBody(msgspec.Struct, kw_only=True):
    """Body of `POST /admin/models`."""

    model: str
    directory: str
    """Directory or hub name of the new version, as the launcher sees it."""


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

    `guests` know more of versions, such as the results of shadow requests.
    """

    def __init__(self, versions: VersionDirectory | None, guests: Guests) -> None:
        self._given, self._guests = versions, guests

    def add(self, routes: Routes) -> None:
        """Adds the routes."""
        routes.get("/admin/models", self.list)
        routes.post("/admin/models", self.set, Body(SetModelBody))
        routes.post("/admin/models/rollback", self.roll_back, Body(RollbackBody))
        routes.post("/admin/models/shadow", self.shadow, Body(ShadowBody))

    async def list(self, request: Request) -> Response:
        """Lists the models with more than one version, with their versions."""
        check_query(request, ())
        models = () if self._given is None else self._given.states.models
        return json_response({"object": "list", "data": [self._facts(one) for one in models]}, headers=NOT_KEPT)

    async def set(self, request: Request) -> Response:
        """Starts a new version of a model. When it is ready, it gets all new requests."""
        body = await _read(request, SetModelBody)
        if not body.directory:
            refuse("directory", "must not be empty")
        return await self._order(ChangeModel("set", body.model, body.directory))

    async def roll_back(self, request: Request) -> Response:
        """Makes the former version, which must still be running, active again for new requests."""
        return await self._order(ChangeModel("rollback", (await _read(request, RollbackBody)).model))

    async def shadow(self, request: Request) -> Response:
        """Starts or stops a shadow version, which computes copies of a share of the requests."""
        body = await _read(request, ShadowBody)
        share = given(body.share, DEFAULT_SHARE)
        if not 0 < share <= 1:
            refuse("share", "must be above 0 and at most 1")
        if not body.directory:
            return await self._order(ChangeModel("unshadow", body.model))
        return await self._order(ChangeModel("shadow", body.model, body.directory, share))

    async def _order(self, order: ChangeModel) -> Response:
        if self._given is None:
            raise ServiceError("not_found", "This gateway has no bus.")
        await self._given.order(order)
        state = self._given.states.find(order.model)
        return json_response({"object": "model"} if state is None else self._facts(state), headers=NOT_KEPT)

    def _facts(self, state: ModelState) -> dict[str, Any]:
        return _facts(state, self._guests)


async def _read(request: Request, body: type[B]) -> B:
    check_query(request, ())
    data = await request_body.read(request.scope["headers"], request.receive)
    return request_fields.read(data, msgspec.json.Decoder(body), request_fields.OWN)


def _facts(state: ModelState, guests: Guests) -> dict[str, Any]:
    return {
        "object": "model",
        "id": state.name,
        "active": state.active,
        "former": state.former or None,
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
