"""The endpoints `GET /v1/requests`, `/v1/requests/{id}` and `/v1/requests/{id}/timeline`.

A key sees its own requests. A key with the scope `admin` sees those of all keys, in the list only if it asks for them
(`all=true`). The answers have neither prompts nor texts, which are not in the record.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.access.call import current_call
from services.gateway.http.json_response import NOT_KEPT, json_response
from services.gateway.openai.listing import check_query, page
from services.gateway.record import Recorder, RequestRecord, summary_of, timeline_of
from shared.api_keys import ANONYMOUS
from shared.errors import ServiceError
from shared.request.checks import refuse

_STATES = ("running", "completed", "failed", "cancelled")
_SORTS = ("newest", "slowest")
_LIST_PARAMETERS = ("limit", "after", "state", "q", "sort", "all")


class RequestEndpoints:
    """The endpoints of the recorder of one gateway."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def list(
        self,
        request: Request,
        limit: int = 50,
        after: str | None = None,
        state: str | None = None,
        q: str = "",
        sort: str = "newest",
        all: bool = False,
    ) -> Response:
        """Lists requests in progress and finished ones: those whose facts contain each word of `q`, in this `sort`."""
        check_query(request, _LIST_PARAMETERS)
        if state is not None and state not in _STATES:
            refuse("state", f"must be one of {', '.join(map(repr, _STATES))}")
        if sort not in _SORTS:
            refuse("sort", "must be 'newest' or 'slowest'")
        self._check_recording()
        words = q.lower().split()
        found = [summary_of(record) for record in self._visible(all)]
        found = [one for one in found if (state is None or one["state"] == state) and _matches(one, words)]
        if sort == "slowest":
            found.sort(key=lambda one: one["duration_s"], reverse=True)
        return json_response(page(found, limit=limit, order="asc", after=after), headers=NOT_KEPT)

    async def retrieve(self, request: Request, request_id: str) -> Response:
        """Answers with the facts of one request."""
        check_query(request, ())
        return json_response(summary_of(self._find(request_id)), headers=NOT_KEPT)

    async def timeline(self, request: Request, request_id: str) -> Response:
        """Answers with the timeline of one request, down to the token."""
        check_query(request, ())
        return json_response(timeline_of(self._find(request_id)), headers=NOT_KEPT)

    def _visible(self, wants_all: bool) -> "list[RequestRecord]":
        key = current_call().key
        if wants_all and "admin" not in key.scopes:
            raise ServiceError(
                "permission_denied",
                f"The API key {key.name!r} may not see the requests of other keys: it lacks the scope 'admin'.",
            )
        records = self._recorder.all()
        return records if wants_all or key is ANONYMOUS else [one for one in records if one.facts.key == key.name]

    def _find(self, name: str) -> RequestRecord:
        self._check_recording()
        record, key = self._recorder.find(name), current_call().key
        # Another key's request is answered like one that does not exist, so that ids cannot be tried.
        if record is None or (record.facts.key != key.name and "admin" not in key.scopes):
            raise ServiceError(
                "not_found",
                f"No request '{name}' is recorded. A gateway keeps its latest requests (--record-requests), and those "
                "that failed or were slowest.",
            )
        return record

    def _check_recording(self) -> None:
        if not self._recorder.is_on:
            raise ServiceError("not_found", "This server records no requests: it was started with --record-requests=0.")


def _matches(summary: dict[str, Any], words: "list[str]") -> bool:
    facts = ("id", "client_request_id", "model", "key", "state", "error_code", "longest_phase")
    text = " ".join([*(str(summary[fact] or "") for fact in facts), *summary["engines"], *summary["finish_reasons"]])
    return all(word in text.lower() for word in words)
