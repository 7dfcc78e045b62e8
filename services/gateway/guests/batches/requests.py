"""Checks and reads the requests of an input file. The functions block, so they are called in threads."""

import os
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import IO, NamedTuple

from antiphon.services.gateway.guests.batches.record import LineError, invalid_line
from antiphon.services.gateway.guests.files.disk import PIECE_S
from antiphon.shared.files import limits as file_limits
from antiphon.shared.files.batch_lines import BatchLineError, BatchRequest, Line, read_request, request_lines

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_REFUSED = ("stream", "priority", "background")
"""Fields that a request of a batch must not have: it always has the lowest priority and is never a background job."""


class InputCheck:
    """The check of an input file: the number of its requests and its errors. The file is valid if it has no errors."""

    def __init__(self, path: Path, endpoint: str) -> None:
        self._path, self._endpoint = path, endpoint
        self._ids = set[int]()
        self.errors: list[LineError] = []

    @property
    def total(self) -> int:
        """Number of requests."""
        return len(self._ids)

    def steps(self) -> Iterator[None]:
        """Reads the file and checks every line, one in each step. Raises FileNotFoundError."""
        with self._path.open("rb") as file:
            for line in request_lines(file):
                try:
                    self._check(line)
                except BatchLineError as error:
                    self.errors.append(invalid_line(error, line.number))
                if len(self.errors) == file_limits.BATCH_ERRORS_MAX or line.number > file_limits.BATCH_LINES_MAX:
                    return
                yield
        if not self._ids and not self.errors:
            self.errors.append(LineError(code="empty_file", message="The input file has no requests."))

    def _check(self, line: Line) -> None:
        if line.number > file_limits.BATCH_LINES_MAX:
            raise BatchLineError(f"an input file must not have more than {file_limits.BATCH_LINES_MAX} lines")
        if line.data.isspace():
            return
        custom_id = read_request(line.data, (self._endpoint,), _REFUSED).custom_id
        if hash(custom_id) in self._ids:
            raise BatchLineError(f"the custom_id {custom_id!r} is used twice")
        if self.total == file_limits.BATCH_REQUESTS_MAX:
            raise BatchLineError(f"a batch must not have more than {file_limits.BATCH_REQUESTS_MAX} requests")
        self._ids.add(hash(custom_id))


class Waiting(NamedTuple):
    """A request that is not sent yet: only its line's place in the input file is in memory."""

    custom_id: str
    start: int
    num_bytes: int


class RequestReader:
    """Reads the requests of a checked file, except those that are already answered. `close` it at the end."""

    def __init__(self, path: Path, endpoint: str, answered: Set[int]) -> None:
        """`answered`: hashes of custom ids."""
        self._path, self._endpoint = path, endpoint
        self._answered = answered
        self._file: IO[bytes] | None = None
        self._lines: Iterator[Line] = iter(())
        self.has_ended = False
        """Whether `next` has reached the end of the file."""

    def next(self) -> list[Waiting]:
        """Returns further requests, at most `BATCH_CONCURRENCY`; perhaps none, although there are more.

        Raises FileNotFoundError.
        """
        if self._file is None:
            self._file = self._path.open("rb")
            self._lines = request_lines(self._file)
        found: list[Waiting] = []
        until = time.monotonic() + PIECE_S
        for line in self._lines:
            if not line.data.isspace():
                custom_id = self._read(line.data).custom_id
                if hash(custom_id) not in self._answered:
                    found.append(Waiting(custom_id, line.start, len(line.data)))
            if len(found) == file_limits.BATCH_CONCURRENCY or time.monotonic() >= until:
                return found
        self.has_ended = True
        return found

    def request(self, waiting: Waiting) -> BatchRequest:
        """Returns a request with its body, one that `next` has returned."""
        assert self._file is not None
        return self._read(os.pread(self._file.fileno(), waiting.num_bytes, waiting.start))

    def close(self) -> None:
        """Closes the file. No other method must be running."""
        if self._file is not None:
            self._file.close()

    def _read(self, line: bytes) -> BatchRequest:
        return read_request(line, (self._endpoint,))
