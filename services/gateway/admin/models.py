"""The endpoints `GET /admin/models`, `POST /admin/models` (a new version), `…/rollback` and `…/shadow`."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http import request_body
from services.gateway.http.json_response import NOT_KEPT, json_response
from services.gateway.openai.bodies import unsupported_params
from services.gateway.openai.body import read_body, read_fields
from services.gateway.openai.listing import check_query
from services.gateway.openai.openapi import Body
from services.gateway.shadow import Comparison
from services.gateway.shadow import facts as comparison_facts
from shared.deployment.model_versions import ModelState, ModelStates
from shared.errors import ServiceError
from shared.messages import ChangeModel
from shared.request.checks import given, refuse

B = TypeVar("B", bound=msgspec.Struct)
Comparisons = Mapping[tuple[str, int], Comparison]


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


BODIES = {
    "/admin/models": Body(SetModelBody),
    "/admin/models/rollback": Body(RollbackBody),
    "/admin/models/shadow": Body(ShadowBody),
}
DEFAULT_SHARE = 0.05


class Versions(Protocol):
    """Implemented by `model_versions.VersionDirectory`."""

    states: ModelStates

    async def order(self, order: ChangeModel) -> None:
        """See VersionDirectory."""
        ...


class ModelEndpoints:
    """The endpoints of one gateway. `versions` is None for a gateway without a bus.

    `comparisons`: results of this gateway's shadow requests, by model and number of the version.
    """

    def __init__(self, versions: Versions | None, comparisons: Comparisons) -> None:
        self._given, self._comparisons = versions, comparisons

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
        compared = {number: one for (name, number), one in self._comparisons.items() if name == state.name}
        return _facts(state, compared)


async def _read(request: Request, body: type[B]) -> B:
    check_query(request, ())
    data = await request_body.read(request.scope["headers"], request.receive)
    unsupported_params.check(read_fields(data), body)
    return read_body(data, msgspec.json.Decoder(body))


def _facts(state: ModelState, compared: Mapping[int, Comparison]) -> dict[str, Any]:
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
                "copies": comparison_facts(compared[one.number]) if one.number in compared else None,
            }
            for one in state.versions
        ],
    }
