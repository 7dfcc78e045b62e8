"""The endpoint `GET /admin/history`: what the server did in the last hour."""

from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.listing import check_query
from antiphon.services.gateway.edge.http.json_response import NOT_KEPT, json_response
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.ops.history.guest import History


class HistoryEndpoint:
    """The endpoint of one gateway."""

    def __init__(self, history: History) -> None:
        self._history = history

    def add(self, routes: Routes) -> None:
        """Adds the route."""
        routes.get("/admin/history", self.history)

    async def history(self, request: Request, since: float = 0.0) -> Response:
        """Answers with the points and events of the last hour, one point for each two seconds, the oldest first.

        `since`: only those later than this Unix time, seconds. Latencies are those of this gateway, other numbers those
        of the whole server. null: nothing was measured.
        """
        check_query(request, ("since",))
        return json_response(self._history.since(since), headers=NOT_KEPT)
