"""The endpoints of batches."""

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.batches import schemas
from services.gateway.batches.batches import Batches
from services.gateway.batches.schemas import BatchBody
from services.gateway.http import request_body
from services.gateway.http.json_response import json_response
from services.gateway.openai.bodies import unsupported_params
from services.gateway.openai.bodies.metadata import check_metadata
from services.gateway.openai.body import read_body, read_fields
from services.gateway.openai.listing import check_query, page


class BatchEndpoints:
    """The endpoints of batches."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def create(self, request: Request) -> Response:
        """Starts a batch. Its input is checked afterwards: a batch with an invalid line becomes `failed`."""
        data = await request_body.read(request.scope["headers"], request.receive)
        unsupported_params.check(read_fields(data), BatchBody, rules=schemas.RULES)
        body = read_body(data, schemas.BATCH_DECODER)
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
