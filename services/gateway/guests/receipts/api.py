"""The API of receipts: the public keys, by which anybody can check a signature."""

from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.base import Api
from antiphon.services.gateway.apis.openai.listing import check_query
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.http.json_response import encoded_response
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.guests.receipts.guest import Receipts

PATH = "/.well-known/antiphon-keys"


class TheApi(Api):
    """See Api."""

    always = True

    def add(self, routes: Routes, serving: Serving) -> None:
        """See Api. Without keys there is nothing to publish."""
        receipts = serving.guests.offered(Receipts)
        self._published = None if receipts is None else receipts.published
        if self._published is not None:
            routes.get(PATH, self.keys)

    async def keys(self, request: Request) -> Response:
        """Answers with the public keys of receipts, a JWK set."""
        check_query(request, ())
        assert self._published is not None
        return encoded_response(self._published)
