"""The API of batches."""

from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.bodies.metadata import check_metadata
from antiphon.services.gateway.apis.openai.listing import check_query, page
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.in_process import InProcessClient
from antiphon.services.gateway.edge.http.json_response import json_response
from antiphon.services.gateway.edge.http.routing.openapi import Body
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.guests.batches import schemas
from antiphon.services.gateway.guests.batches.batches import Batches
from antiphon.services.gateway.guests.batches.schemas import BatchBody
from antiphon.services.gateway.guests.batches.store import BatchStore
from antiphon.services.gateway.guests.files.store import FileStore


class TheApi(Api):
    """See Api."""

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api."""
        files = serving.guests.offered(FileStore)
        assert files is not None  # NEEDS
        self._batches = Batches(BatchStore(files), InProcessClient(lambda: routes.app), serving.keys)
        routes.post("/v1/batches", self.create, Body(BatchBody, ("input_file_id", "endpoint", "completion_window")))
        routes.get("/v1/batches", self.list)
        routes.get("/v1/batches/{batch_id}", self.retrieve)
        routes.post("/v1/batches/{batch_id}/cancel", self.cancel)

    async def answering(self) -> None:
        """See Lifetime. Continues the batches of gateways that have ended."""
        await self._batches.continue_all()

    async def create(self, request: Request) -> Response:
        """Starts a batch. Its input is checked afterwards: a batch with an invalid line becomes `failed`."""
        data = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, schemas.BATCH_DECODER, schemas.RULES)
        input_file_id, endpoint = schemas.check(body)
        check_metadata(body.metadata)
        record = await self._batches.create(input_file_id, endpoint, body.metadata or {})
        return json_response(record.to_object())

    async def list(self, request: Request, limit: int = 20, after: str | None = None) -> Response:
        """Lists the batches, the newest first."""
        check_query(request, ("limit", "after"))
        objects = [record.to_object() for record in await self._batches.all()]
        return json_response(page(objects, limit=limit, order="desc", after=after))

    async def retrieve(self, batch_id: str) -> Response:
        """Answers with a batch."""
        return json_response((await self._batches.get(batch_id)).to_object())

    async def cancel(self, batch_id: str) -> Response:
        """Cancels a batch. Its answers so far are kept."""
        return json_response((await self._batches.cancel(batch_id)).to_object())
