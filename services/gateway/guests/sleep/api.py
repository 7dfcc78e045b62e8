"""The endpoints by which operators put engines to sleep and wake them. With API keys they need the scope `admin`.

POST /sleep, POST /wake_up, GET /is_sleeping        vLLM's: all engines of a model; the answer comes when it is done
POST /admin/engines/{id}/sleep, …/wake              one engine; the answer comes at once
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.listing import check_query
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import NOT_KEPT, json_response
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.guests.sleep.guest import SleepingEngines
from antiphon.services.gateway.path.router import model_of
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineStatus, Heartbeat, Sleep, SleepMode, Wake
from antiphon.shared.request.checks import given, refuse

TAGS = ("weights", "kv_cache")
MODES: tuple[SleepMode, ...] = ("wait", "keep", "abort")


class SleepBody(msgspec.Struct, kw_only=True):
    """Body of `/admin/engines/{id}/sleep`."""

    level: int | None = None
    """1: free the KV cache, on a GPU the weights too; 2: free the weights everywhere. Default: 1."""
    mode: str | None = None
    """What happens to running requests: wait (they move or end first), keep (they wait until an engine is ready) or
    abort. Default: wait."""
    on_demand: bool | None = None
    """Whether the next request wakes the engine. Default: no, only an operator does."""


_SLEEP = msgspec.json.Decoder(SleepBody)


class TheApi(Api):
    """See Api. Without the guest no engine can sleep."""

    always = True

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        engines = serving.guests.offered(SleepingEngines)
        if engines is None:
            return
        self._engines, self._backend = engines, serving.backend
        routes.post("/sleep", self.sleep)
        routes.post("/wake_up", self.wake_up)
        routes.get("/is_sleeping", self.is_sleeping)
        routes.post("/admin/engines/{engine_id}/sleep", self.sleep_one, Body(SleepBody))
        routes.post("/admin/engines/{engine_id}/wake", self.wake_one)

    # --- vLLM's ---

    async def sleep(self, request: Request) -> Response:
        """Puts all engines of a model to sleep. Answers when they sleep."""
        check_query(request, ("level", "mode", "model", "on_demand"))
        query = request.query_params
        level, on_demand = query.get("level", "1"), query.get("on_demand", "false")
        if on_demand not in ("true", "false"):
            refuse("on_demand", "must be true or false")
        order = _order(int(level) if level.isdigit() else -1, query.get("mode", "wait"), on_demand=on_demand == "true")
        engines = self._of_model(query.get("model"))
        for engine in engines:
            await self._engines.controls.order(engine, order)
        await self._until(engines, "sleep", lambda engine: _status(engine).sleep.level >= order.level)
        return self._answer(engines)

    async def wake_up(self, request: Request) -> Response:
        """Wakes all engines of a model. Answers when they take requests."""
        check_query(request, ("tags", "model"))
        tags = request.query_params.getlist("tags")
        if tags and set(tags) != set(TAGS):
            refuse("tags", f"an engine wakes as a whole: leave tags out, or name both, {' and '.join(TAGS)}")
        engines = self._of_model(request.query_params.get("model"))
        for engine in engines:
            await self._engines.controls.order(engine, Wake())
        await self._until(engines, "wake", lambda engine: engine.state != "sleeping")
        return self._answer(engines)

    async def is_sleeping(self, request: Request) -> Response:
        """Tells whether all engines of a model sleep."""
        check_query(request, ("model",))
        engines = self._of_model(request.query_params.get("model"))
        return json_response({"is_sleeping": all(_status(one).sleep.level > 0 for one in engines)}, headers=NOT_KEPT)

    # --- one engine ---

    async def sleep_one(self, request: Request, engine_id: str) -> Response:
        """Puts an engine to sleep. `GET /admin/engines/{id}` tells when it sleeps."""
        check_query(request, ())
        data = await request_body.read(request.scope["headers"], request.receive) or b"{}"
        body = request_fields.read(data, _SLEEP, request_fields.OWN)
        order = _order(given(body.level, 1), given(body.mode, "wait"), on_demand=bool(body.on_demand))
        await self._engines.controls.order(self._engines.controls.view(engine_id).beat, order)
        return self._answer([self._engines.controls.view(engine_id).beat])

    async def wake_one(self, request: Request, engine_id: str) -> Response:
        """Wakes an engine. `GET /admin/engines/{id}` tells when it takes requests."""
        check_query(request, ())
        await self._engines.controls.order(self._engines.controls.view(engine_id).beat, Wake())
        return self._answer([self._engines.controls.view(engine_id).beat])

    # --- inside ---

    def _of_model(self, name: str | None) -> list[Heartbeat]:
        """Returns the running engines of a model; of the usual one for None. Raises ServiceError if it has none."""
        card = self._backend.resolve_model(name)
        found = [one for one in self._engines.engines() if model_of(one) == card.served_by]
        if not found:
            raise ServiceError("no_engine", f"No engine of the model {card.name!r} is running.", retry_after_s=1.0)
        return found

    async def _until(self, engines: list[Heartbeat], verb: str, done: Any) -> None:
        """Waits until the latest heartbeats of the engines are as wanted. Raises ServiceError after a time."""
        names = {engine.id for engine in engines}

        def late() -> list[str]:
            ready = {engine.id for engine in self._engines.engines() if engine.id in names and done(engine)}
            return sorted(names - ready)

        if not await self._engines.until(lambda: not late()):
            what = "they still have requests, see `mode`" if verb == "sleep" else "their logs tell more"
            raise ServiceError("timeout", f"Engines that do not {verb} yet: {', '.join(late())}; {what}.")

    def _answer(self, engines: list[Heartbeat]) -> Response:
        names = {engine.id for engine in engines}
        found = [
            {"id": one.id, "state": one.state, **msgspec.structs.asdict(_status(one).sleep)}
            for one in self._engines.engines()
            if one.id in names
        ]
        return json_response({"engines": found}, headers=NOT_KEPT)


def _order(level: int, mode: str, *, on_demand: bool) -> Sleep:
    if level not in (1, 2):
        refuse("level", "must be 1 or 2")
    if mode not in MODES:
        refuse("mode", f"must be one of {', '.join(MODES)}")
    return Sleep(level, MODES[MODES.index(mode)], on_demand)


def _status(engine: Heartbeat) -> EngineStatus:
    assert isinstance(engine.status, EngineStatus)
    return engine.status
