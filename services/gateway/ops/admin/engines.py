"""The endpoints `GET /admin/engines/{id}`, and `POST` of `…/drain` and `…/resume`."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.listing import check_query
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import NOT_KEPT, json_response
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.path.placement.engine_controls import EngineControls, EngineView
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineStatus


class DrainBody(msgspec.Struct, kw_only=True):
    """Body of `/admin/engines/{id}/drain`."""

    force: bool | None = None
    """Whether even the last engine of a model may be drained. Default: no."""


_DRAIN = msgspec.json.Decoder(DrainBody)


class EngineEndpoints:
    """The endpoints of one gateway. `controls` is None for a gateway without a bus, which has no engines."""

    def __init__(self, controls: EngineControls | None) -> None:
        self._given = controls

    def add(self, routes: Routes) -> None:
        """Adds the routes."""
        routes.get("/admin/engines/{engine_id}", self.retrieve)
        routes.post("/admin/engines/{engine_id}/drain", self.drain, Body(DrainBody))
        routes.post("/admin/engines/{engine_id}/resume", self.resume)

    async def retrieve(self, request: Request, engine_id: str) -> Response:
        """Answers with the state of an engine, and with the sequences that have moved away from it."""
        check_query(request, ())
        return json_response(_facts(self._controls(engine_id).view(engine_id)), headers=NOT_KEPT)

    async def drain(self, request: Request, engine_id: str) -> Response:
        """Drains an engine: it gets no new sequences, and its sequences move to other engines, until it is resumed."""
        check_query(request, ())
        data = await request_body.read(request.scope["headers"], request.receive) or b"{}"
        body = request_fields.read(data, _DRAIN, request_fields.OWN)
        view = await self._controls(engine_id).withdraw(engine_id, force=bool(body.force))
        return json_response(_facts(view), headers=NOT_KEPT)

    async def resume(self, request: Request, engine_id: str) -> Response:
        """Ends the draining of an engine."""
        check_query(request, ())
        return json_response(_facts(await self._controls(engine_id).resume(engine_id)), headers=NOT_KEPT)

    def _controls(self, engine_id: str) -> EngineControls:
        if self._given is None:
            raise ServiceError("not_found", f"No engine is called {engine_id!r}: this gateway has none.")
        return self._given


def _facts(view: EngineView) -> dict[str, Any]:
    return {
        "object": "engine",
        "id": view.beat.id,
        "state": view.beat.state,
        "model": getattr(view.beat.status, "model", ""),
        "sequences": view.num_sequences,
        "moved": [
            {"sequence": move.sequence_id, "position": move.position, "to": move.to or None} for move in view.moved
        ],
        "others": view.others,
        "sleep": _sleep(view.beat.status),
    }


def _sleep(status: object) -> dict[str, Any] | None:
    return msgspec.structs.asdict(status.sleep) if isinstance(status, EngineStatus) else None
