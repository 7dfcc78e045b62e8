"""Receivers of usage records: the bus, a file of JSON lines, or a web server to which such lines are posted.

A line has the fields of `UsageRecord` by name. The file gets each record once. A web server may get a record twice if
its answer was lost; it recognises the duplicate by `request_id`.
"""

import asyncio
import base64
import fcntl
import os
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from antiphon.services.gateway.edge.access.usage import DeliveryError
from antiphon.shared.bus.transport import Transport
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import UsageRecord
from antiphon.shared.version import __version__

WEBHOOK_TIMEOUT_S = 10.0
_FILE = "file:"


class BusSink:
    """Publishes records on the bus, for any subscriber."""

    def __init__(self, transport: Transport, subject: str) -> None:
        self._transport, self._subject = transport, subject

    async def deliver(self, records: Sequence[UsageRecord]) -> None:
        """See `usage.Deliver`."""
        try:
            for record in records:
                await self._transport.publish(self._subject, encode(record))
        except ServiceError as error:
            raise DeliveryError(error.message) from error


class FileSink:
    """Appends records to a file, which other processes may append to as well.

    Creates a new file if it was moved away.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def check(self) -> None:
        """Raises SettingsError if the file cannot be appended to."""
        try:
            self._append(b"")
        except OSError as error:
            raise SettingsError(f"--usage-sink: {self._path} cannot be written: {error.strerror}") from error

    async def deliver(self, records: Sequence[UsageRecord]) -> None:
        """See `usage.Deliver`."""
        try:
            await asyncio.to_thread(self._append, json_lines(records))
        except OSError as error:
            raise DeliveryError(str(error)) from error

    def _append(self, data: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # gateways of one machine may share the file
            length = os.fstat(descriptor).st_size
            if os.write(descriptor, data) != len(data):
                # The disk is full: remove the part that was written, so that the whole batch can be written again.
                os.ftruncate(descriptor, length)
                raise OSError("the file takes no more data")
        finally:
            os.close(descriptor)


class WebhookSink:
    """Posts records to a web server, as lines of JSON (`application/x-ndjson`). A status below 300 means success.

    `url` may have a user and a password (`https://USER:PASSWORD@host/`), which are sent as basic authorization.
    Redirects are not followed: urllib would send a GET without the records.
    """

    def __init__(self, url: str) -> None:
        """Raises ValueError if the URL has no host."""
        parts = urlsplit(url)
        if not parts.hostname:
            raise ValueError("the URL has no host")
        user, _, host = parts.netloc.rpartition("@")
        self._url = parts._replace(netloc=host).geturl()
        self._headers = {"content-type": "application/x-ndjson", "user-agent": f"antiphon/{__version__}"}
        if user:
            self._headers["authorization"] = _basic_authorization(parts)
        self._opener = urllib.request.build_opener(_NoRedirects)

    async def deliver(self, records: Sequence[UsageRecord]) -> None:
        """See `usage.Deliver`."""
        try:
            await asyncio.to_thread(self._post, json_lines(records))
        except (OSError, ValueError, HTTPException) as error:  # URLError and HTTPError are OSErrors
            raise DeliveryError(str(error) or repr(error)) from error

    def _post(self, data: bytes) -> None:
        request = urllib.request.Request(self._url, data, self._headers, method="POST")
        with self._opener.open(request, timeout=WEBHOOK_TIMEOUT_S) as response:
            response.read()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Returns None, which makes a redirect an HTTPError."""


def _basic_authorization(parts: SplitResult) -> str:
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def sink_of(word: str) -> FileSink | WebhookSink:
    """Returns the sink that `--usage-sink` names: `file:PATH` or a URL. Raises SettingsError."""
    if not word.startswith(_FILE):
        try:
            return WebhookSink(word)
        except ValueError as error:
            raise SettingsError(f"--usage-sink: not a usable URL: {error}") from None
    sink = FileSink(word.removeprefix(_FILE))
    sink.check()
    return sink


def json_lines(records: Sequence[UsageRecord]) -> bytes:
    """Returns the records as lines of JSON, with the names of their fields."""
    return msgspec.json.Encoder().encode_lines([msgspec.structs.asdict(record) for record in records])
