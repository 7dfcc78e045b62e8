"""The endpoints `GET /v1/requests`, `/v1/requests/{id}` and `/v1/requests/{id}/timeline`.

A key sees its own requests. A key with the scope `admin` sees those of all keys, in the list only if it asks for them
(`all=true`). Requests of all gateways are found: see `timeline.directory`. The answers have no prompts and no texts,
also if the record has them.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.listing import check_query, page
from antiphon.services.gateway.edge.access.call import current_call, reachable_key
from antiphon.services.gateway.edge.http.json_response import NOT_KEPT, json_response
from antiphon.services.gateway.edge.http.routing.routes import Routes
from antiphon.services.gateway.ops.timeline.directory import RecordDirectory
from antiphon.services.gateway.ops.timeline.slowness import mark_outliers
from antiphon.services.gateway.ops.timeline.trace_events import trace_events_of
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import RecordListQuery, RecordOrder, RecordQuery, RequestState
from antiphon.shared.request.checks import refuse
from antiphon.shared.security.api_keys import ANONYMOUS

_STATES: dict[str, RequestState] = {
    "running": "running",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
}
_SORTS: dict[str, RecordOrder] = {"newest": "newest", "slowest": "slowest"}
_FORMATS = ("timeline", "trace_events")
_LIST_PARAMETERS = ("limit", "after", "state", "q", "sort", "slow", "all")


class RequestEndpoints:
    """The endpoints of one gateway."""

    def __init__(self, records: RecordDirectory) -> None:
        self._records = records

    def add(self, routes: Routes) -> None:
        """Adds the routes."""
        routes.get("/v1/requests", self.list)
        routes.get("/v1/requests/{request_id}", self.retrieve)
        routes.get("/v1/requests/{request_id}/timeline", self.timeline)

    async def list(
        self,
        request: Request,
        limit: int = 50,
        after: str | None = None,
        state: str | None = None,
        q: str = "",
        sort: str = "newest",
        slow: bool = False,
        all: bool = False,
    ) -> Response:
        """Lists running and finished requests whose fields contain all words of `q`, in the order `sort`.

        With `slow`, only those that were much slower than others (`timeline.slowness`). `num_slow` in the answer is the
        number of slow requests.
        """
        check_query(request, _LIST_PARAMETERS)
        if state is not None and state not in _STATES:
            refuse("state", f"must be one of {', '.join(map(repr, _STATES))}")
        if sort not in _SORTS:
            refuse("sort", "must be 'newest' or 'slowest'")
        self._check_recording()
        query = RecordListQuery(
            key=_whose_requests(all), state=_STATES.get(state or ""), words=_words(q), order=_SORTS[sort], slow=slow
        )
        found = await self._records.list(query)
        body = page(found.requests, limit=limit, order="asc", after=after)
        mark_outliers(body["data"])
        num_slow = sum(bool(one.get("slow")) for one in found.requests)
        return json_response({**body, "num_slow": num_slow, "silent_gateways": found.silent_gateways}, headers=NOT_KEPT)

    async def retrieve(self, request: Request, request_id: str) -> Response:
        """Answers with the facts of one request."""
        check_query(request, ())
        self._check_recording()
        found = await self._records.find(RecordQuery(request_id, reachable_key(), "summary"))
        return json_response(self._found(request_id, found), headers=NOT_KEPT)

    async def timeline(self, request: Request, request_id: str, format: str = "timeline") -> Response:
        """Answers with the timeline of one request, down to the token; `format=trace_events`: for trace viewers."""
        check_query(request, ("format",))
        if format not in _FORMATS:
            refuse("format", f"must be one of {', '.join(map(repr, _FORMATS))}")
        self._check_recording()
        found = self._found(request_id, await self._records.timeline(request_id, reachable_key()))
        if format == "timeline":
            return json_response(found, headers=NOT_KEPT)
        attachment = {"content-disposition": f'attachment; filename="{found["id"]}.trace.json"'}
        return json_response(trace_events_of(found), headers={**NOT_KEPT, **attachment})

    def _found(self, name: str, found: dict[str, Any] | None) -> dict[str, Any]:
        if found is None:
            raise ServiceError(
                "not_found",
                f"No request '{name}' is recorded. A gateway keeps its latest requests (--record-requests), and "
                "those that failed or were slowest.",
            )
        return found

    def _check_recording(self) -> None:
        if not self._records.recorder.is_on:
            raise ServiceError("not_found", "This server records no requests: it was started with --record-requests=0.")


def _words(text: str) -> tuple[str, ...]:
    """Returns the words of a search, each once."""
    words = tuple(dict.fromkeys(text[: limits.SEARCH_CHARS_MAX + 1].lower().split()))
    if len(text) > limits.SEARCH_CHARS_MAX or len(words) > limits.SEARCH_WORDS_MAX:
        refuse("q", f"must have at most {limits.SEARCH_CHARS_MAX} characters and {limits.SEARCH_WORDS_MAX} words")
    return words


def _whose_requests(wants_all: bool) -> str:
    """Returns the name of the key whose requests are listed; empty for all keys."""
    key = current_call().key
    if wants_all and "admin" not in key.scopes:
        raise ServiceError(
            "permission_denied",
            f"The API key {key.name!r} may not see the requests of other keys: it lacks the scope 'admin'.",
        )
    return "" if wants_all or key is ANONYMOUS else key.name
