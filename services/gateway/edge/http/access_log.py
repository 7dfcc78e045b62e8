"""One line for each HTTP request when it has ended: what was asked, how it ended, and what was generated.

Never prompts, texts or query strings. What clients send is escaped by the format of the log.
"""

import logging
from collections.abc import Iterator
from typing import Any

from antiphon.services.gateway.edge.access.call import Call, Generated
from antiphon.shared.observability.logs import Told
from antiphon.shared.security.api_keys import ANONYMOUS

log = logging.getLogger("antiphon.access")
PATH_CHARS_MAX = 200
"""Longest part of a path that is written."""
_POLLED = frozenset(
    {
        *("/livez", "/readyz", "/health", "/ping", "/metrics", "/load"),
        *("/", "/docs", "/openapi.json", "/admin/topology", "/admin/history", "/v1/requests", "/v1/models"),
    }
)
"""Paths that probes and the console ask for again and again, and files of the console."""
_FILES = "/console/"
_REFUSED = (401, 403)


class AccessLog:
    """The lines of one gateway. `is_on`: whether there are any (`--access-log`)."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def ended(
        self, method: str, path: str, status: int, seconds: float, *, shown: str, call: Call, request_id: str
    ) -> None:
        """Writes the line of a request. `path`: of the route. `shown`: as the client has written it.

        Requests that are polled are on the level DEBUG, so are those of a batch, of which a file may have 100,000.
        """
        level = logging.DEBUG if call.in_batch or _is_polled(method, path, status) else logging.INFO
        if self._is_on and log.isEnabledFor(level):
            line = _Line(method, shown, status, seconds, call, request_id)
            # Not `log.log`, which looks for its caller.
            log.handle(logging.LogRecord(log.name, level, __file__, 0, line, (), None))


class _Line(Told):
    """The line of one request that has ended."""

    def __init__(self, method: str, path: str, status: int, seconds: float, call: Call, request_id: str) -> None:
        self._method, self._path, self._status = method, _word(path[:PATH_CHARS_MAX]), status
        self._seconds, self._call, self._request_id = seconds, call, request_id

    def __str__(self) -> str:
        facts = " ".join(f"{name}={_word(value)}" for name, value in _facts(self._call, self._request_id))
        return f"{self._method} {self._path} {self._status} {self._seconds:.3f}s {facts}"

    def fields(self) -> dict[str, Any]:
        """See Told."""
        facts = dict(_facts(self._call, self._request_id))
        own = {"method": self._method, "path": self._path, "status": self._status}
        return {**own, "duration_s": round(self._seconds, 4), **facts}


def _is_polled(method: str, path: str, status: int) -> bool:
    is_known = path in _POLLED or path.startswith(_FILES)
    return is_known and method in ("GET", "HEAD") and status not in _REFUSED


def _facts(call: Call, request_id: str) -> Iterator[tuple[str, Any]]:
    """Yields the facts that are known of a request, and of what it generated."""
    done = call.generated
    yield "request_id", request_id if done is None else done.request_id
    if call.client_request_id:
        yield "client_request_id", call.client_request_id
    if call.key is not ANONYMOUS:
        yield "key", call.key.name
    if done is not None:
        yield from _generated(done)
    if error := call.error_code or (done.error if done is not None else ""):
        yield "error", error


def _generated(done: Generated) -> Iterator[tuple[str, Any]]:
    yield "model", done.model
    yield "prompt_tokens", done.prompt_tokens
    yield "output_tokens", done.output_tokens
    if done.first_token_s:
        yield "first_token_s", round(done.first_token_s, 4)
    if done.engines:
        yield "engines", done.engines
    if done.finish_reasons:
        yield "finish_reasons", done.finish_reasons


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    # A name from a file of keys may have spaces, which would look like the next fact.
    return str(value).replace(" ", "%20")
