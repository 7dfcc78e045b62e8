"""Receivers of usage records: the bus, a file of JSON lines, or a web server to which such lines are posted.

A line has the fields of `UsageRecord` by name. The file gets each record once. A web server may get a record twice if
its answer was lost; it recognises the duplicate by `request_id`. The `name` of a sink has no password.
"""

import asyncio
import base64
import fcntl
import os
import stat
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from antiphon.services.gateway.edge.access.usage import DeliveryError
from antiphon.shared import limits
from antiphon.shared.bus.transport import Transport
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import UsageRecord
from antiphon.shared.version import __version__

WEBHOOK_TIMEOUT_S = 10.0
_FILE = "file:"
_RECENT_MAX = 2 * limits.USAGE_TAIL_BYTES // 256
"""Ids that a file's sink remembers: at least those of the end of the file that it reads, whose lines are longer."""


class _Line(msgspec.Struct):
    request_id: str


_IDS = msgspec.json.Decoder(_Line)


class BusSink:
    """Publishes records on the bus, for any subscriber."""

    def __init__(self, transport: Transport, subject: Callable[[str], str]) -> None:
        """`subject`: returns that of the record of a request."""
        self._transport, self._subject = transport, subject

    async def deliver(self, records: Sequence[UsageRecord]) -> None:
        """See `usage.Deliver`."""
        try:
            for record in records:
                await self._transport.publish(self._subject(record.request_id), encode(record))
        except ServiceError as error:
            raise DeliveryError(error.message) from error


class FileSink:
    """Appends records to a file, which other processes may append to as well, each record once.

    A record that is among the last ones of the file (`USAGE_TAIL_BYTES`) is left out. Returns from a delivery when the
    records are on the disk (fsync). Creates a new file if it was moved away.
    """

    def __init__(self, path: str) -> None:
        self.name = _FILE + path
        self._path = Path(path)
        self._known_to = -1, -1
        """Inode and length of the file up to which its records are known."""
        self._recent: deque[str] = deque(maxlen=_RECENT_MAX)

    def check(self) -> None:
        """Raises SettingsError if the file cannot be appended to."""
        try:
            self._append(())
        except OSError as error:
            raise SettingsError(f"--usage-sink: {self._path} cannot be written: {error.strerror}") from error

    async def deliver(self, records: Sequence[UsageRecord]) -> None:
        """See `usage.Deliver`."""
        try:
            await asyncio.to_thread(self._append, records)
        except OSError as error:
            raise DeliveryError(str(error)) from error

    def _append(self, records: Sequence[UsageRecord]) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # gateways of one machine may share the file
            found = os.fstat(descriptor)
            is_file = stat.S_ISREG(found.st_mode)  # else a pipe or a device, which cannot be read
            if is_file:
                self._read_tail(found.st_ino, found.st_size)
            known = set(self._recent)
            new = [*{one.request_id: one for one in records if one.request_id not in known}.values()]
            data = json_lines(new)
            if os.write(descriptor, data) != len(data):
                # The disk is full: remove the part that was written, so that the whole batch can be written again.
                os.ftruncate(descriptor, found.st_size)
                raise OSError("the file takes no more data")
            if is_file and data:
                os.fsync(descriptor)
            self._known_to = found.st_ino, found.st_size + len(data)
            self._recent += [one.request_id for one in new]
        finally:
            os.close(descriptor)

    def _read_tail(self, inode: int, length: int) -> None:
        """Notes the ids of the last records, as far as others have written them since this sink did."""
        known_inode, known_length = self._known_to
        start = max(0, length - limits.USAGE_TAIL_BYTES)
        if inode == known_inode and known_length <= length:
            start = max(start, known_length)
        if start >= length:
            return
        with self._path.open("rb") as file:
            file.seek(start)
            for line in file.read(length - start).splitlines():
                try:
                    self._recent.append(_IDS.decode(line).request_id)
                except msgspec.DecodeError:
                    continue  # the end of a line that was cut, or a line of somebody else


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
        self.name = self._url = parts._replace(netloc=host).geturl()
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
