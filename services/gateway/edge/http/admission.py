"""ASGI middleware that admits a request within the limits of its key before its body is read.

Every POST request and every search counts as one request, whether it generates, tokenizes, uploads a file or starts a
batch. A generation reserves its tokens, and places for its further sequences, when it starts (`reservation`).
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from antiphon.services.gateway.edge.access.call import current_call, route_path
from antiphon.services.gateway.edge.access.quotas import Quotas
from antiphon.services.gateway.edge.access.reservation import QuotaReservation

_SEARCH = "/v1/requests"
_CANCEL = "/cancel"
_RESUMES = b"last-event-id"
_TOO_MANY, _OWN_FAULT = 429, 500


class Admission:
    """Wraps an application. Requests of keys without limits are passed on. The gateway's own do not come here."""

    def __init__(self, app: ASGIApp, quotas: Quotas) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admits a request, then passes it on. Raises ServiceError('rate_limit_exceeded')."""
        call, status = current_call(), _OWN_FAULT
        if not call.key.is_limited or not _counts(scope):
            await self._app(scope, receive, send)
            return

        async def forward(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        quota = self._quotas.of(call.key)
        try:
            call.reservation = QuotaReservation(quota, await quota.admit(0))
        finally:
            call.response_headers = quota.headers()
        try:
            await self._app(scope, receive, forward)
        finally:
            # A generation has taken the reservation over, and ends it itself.
            if call.reservation is not None:
                if status == _TOO_MANY or status >= _OWN_FAULT:
                    call.reservation.withdraw()
                else:
                    call.reservation.finish(0)


def _counts(scope: Scope) -> bool:
    """Whether a request counts. To cancel something is always possible, and to resume a stream was admitted before."""
    path = route_path(scope)
    if scope["method"] != "POST":
        return path == _SEARCH and b"q=" in scope["query_string"]
    return not path.endswith(_CANCEL) and all(name != _RESUMES for name, _ in scope["headers"])
