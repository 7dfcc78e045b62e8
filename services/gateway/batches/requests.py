"""Checks and reads the requests of an input file. The functions block, so they are called in threads."""

import json
from collections.abc import Set
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

from services.gateway.batches.record import LineError, invalid_line
from shared import limits
from shared.request.batch_lines import BatchLineError, BatchRequest, numbered_lines, read_request

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_NOT_IN_BATCHES = ("priority", "background")
"""Fields that a request of a batch must not have: it always has the lowest priority and is never a background job."""


class Checked(NamedTuple):
    """The number of requests in an input file and its errors. The file is valid if `errors` is empty."""

    total: int
    errors: list[LineError]


def check(path: Path, endpoint: str) -> Checked:
    """Reads the whole file and checks every line. Raises FileNotFoundError."""
    ids = set[str]()
    errors: list[LineError] = []
    with path.open("rb") as file:
        for number, line in numbered_lines(file):
            try:
                request = _read(line, endpoint)
                if request.custom_id in ids:
                    raise BatchLineError(f"the custom_id {request.custom_id!r} is used twice")
                if len(ids) == limits.BATCH_REQUESTS_MAX:
                    raise BatchLineError(f"a batch must not have more than {limits.BATCH_REQUESTS_MAX} requests")
                ids.add(request.custom_id)
            except BatchLineError as error:
                errors.append(invalid_line(error, number))
                if len(errors) == limits.BATCH_ERRORS_MAX:
                    break
    if not ids and not errors:
        errors.append(LineError(code="empty_file", message="The input file has no requests."))
    return Checked(len(ids), errors)


class RequestReader:
    """Reads the requests of a checked file, except those that are already answered."""

    def __init__(self, path: Path, endpoint: str, answered: Set[str]) -> None:
        self._path, self._endpoint = path, endpoint
        self._answered = answered
        self._file: IO[bytes] | None = None

    def next(self, count: int) -> list[BatchRequest]:
        """Returns up to `count` further requests; none at the end of the file. Raises FileNotFoundError."""
        if self._file is None:
            self._file = self._path.open("rb")
        requests = (_read(line, self._endpoint) for _, line in numbered_lines(self._file))
        return list(islice((one for one in requests if one.custom_id not in self._answered), count))

    def close(self) -> None:
        """Closes the file. `next` must not be running."""
        if self._file is not None:
            self._file.close()


def encoded_body(request: BatchRequest) -> bytes:
    """Returns the body of a request as JSON."""
    return json.dumps(request.body).encode()


def _read(line: bytes, endpoint: str) -> BatchRequest:
    request = read_request(line, (endpoint,))
    for name in _NOT_IN_BATCHES:
        if request.body.get(name):
            raise BatchLineError(f"'{name}' is not possible in a batch")
    return request
