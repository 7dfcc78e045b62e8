"""Keeps files in a directory. Gateways that share the directory have the same files.

A stored file consists of two files: `ID` has the data, `ID.json` the description. While it is being written, the data
is in `ID.part`. `ID.json` is written last; from then on clients see the file. All work on the disk is done in threads.
Only the operating system's user that runs the gateways can read the files.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from services.gateway.access.call import may_see
from services.gateway.files import temporary
from services.gateway.http.request_id import new_id
from shared import limits
from shared.errors import ServiceError
from shared.security.api_keys import ANONYMOUS

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")
ID_PREFIX = "file-"
_ID = re.compile(r"file-[A-Za-z0-9]{22}")
_PART, _DESCRIPTION = ".part", ".json"
_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a file. Times are in Unix seconds."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None
    owner: str = ANONYMOUS.name
    """Name of the API key that created the file. Not shown."""

    def to_object(self) -> dict[str, Any]:
        """Returns the description as OpenAI's API shows it."""
        shown = msgspec.to_builtins(self)
        del shown["owner"]
        return shown


_DECODER = msgspec.json.Decoder(StoredFile)


class FileWriter:
    """Writes a new file, or appends to an unfinished one. Clients see the file after `commit`.

    A cancelled method returns only after its disk operation has ended, so the next method finds a consistent file.
    """

    def __init__(self, store: "FileStore", file_id: str, max_bytes: int) -> None:
        self.id = file_id
        self.num_bytes = 0
        """Number of bytes that this object has written."""
        self._max_bytes = max_bytes
        self._store = store
        self._file: FileIO | None = None
        self._lock = threading.Lock()
        """Held by the thread that writes, so that concurrent writes are not interleaved."""

    @property
    def path(self) -> Path:
        """Path of the data until it is committed."""
        return self._store.directory / f"{self.id}{_PART}"

    def reopen(self) -> None:
        """Makes a committed file unfinished again. Has no effect on an unfinished file. Blocks."""
        committed = self._store.directory / self.id
        if committed.exists():
            (self._store.directory / f"{self.id}{_DESCRIPTION}").unlink(missing_ok=True)
            committed.replace(self.path)

    async def write(self, data: bytes) -> None:
        """Appends data. Raises ServiceError('request_too_large') if the file becomes too large."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            message = f"The file is larger than {self._max_bytes} bytes."
            raise ServiceError("request_too_large", message, param="file")
        await to_the_end(self._write, data)

    async def commit(self, filename: str, purpose: str, owner: str, ttl_s: int = limits.FILE_TTL_S) -> StoredFile:
        """Publishes the file to clients and returns its description.

        `owner`: name of the API key that may use it. `ttl_s`: seconds after which it is deleted.
        """
        return await to_the_end(self._commit, filename, purpose, owner, ttl_s)

    async def abort(self) -> None:
        """Removes what was written."""
        await to_the_end(self._abort)

    def _write(self, data: bytes) -> None:
        with self._lock:
            if self._file is None:
                # Without a buffer, so that what is written survives the process.
                self._file = FileIO(self.path, "ab", opener=_private)
            while data:
                data = data[self._file.write(data) :]

    def _commit(self, filename: str, purpose: str, owner: str, ttl_s: int) -> StoredFile:
        self._write(b"")
        self._close()
        target = self._store.directory / self.id
        self.path.replace(target)
        now = self._store.now()
        described = StoredFile(
            id=self.id,
            bytes=target.stat().st_size,
            created_at=now,
            expires_at=now + ttl_s,
            filename=filename,
            purpose=purpose,
            owner=owner,
        )
        write_atomically(self._store.directory / f"{self.id}{_DESCRIPTION}", msgspec.json.encode(described))
        return described

    def _abort(self) -> None:
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class FileStore:
    """The files in one directory. A call (`access.call`) finds only the files that its key may see."""

    def __init__(self, directory: str = "", clock: Callable[[], float] = time.time) -> None:
        """`directory` is made when the first file is written; "": a temporary one, deleted at the end of the process.

        `clock` returns Unix seconds.
        """
        self._given = directory
        self._clock = clock
        self._directory: Path | None = None
        self._making = threading.Lock()

    @property
    def directory(self) -> Path:
        """The directory. Made at the first call; raises ServiceError if it cannot be made."""
        with self._making:
            if self._directory is None:
                self._directory = self._make()
            return self._directory

    async def remove_leftovers(self) -> None:
        """Removes the temporary directories of gateways that were killed. Called when a gateway starts."""
        if not self._given:
            await asyncio.to_thread(temporary.remove_leftovers)

    def may_have_files(self) -> bool:
        """Whether there may be files of an earlier process. Does not make the directory."""
        return bool(self._given) and Path(self._given).is_dir()

    def now(self) -> int:
        """Returns the time in Unix seconds."""
        return int(self._clock())

    async def create(self) -> FileWriter:
        """Starts a new file. Raises ServiceError('request_too_large') if there is no room for a further one."""
        await self.check_room()
        return self.writer(ID_PREFIX + new_id())

    async def check_room(self) -> None:
        """Raises ServiceError('request_too_large') if there is no room for a further file."""
        await asyncio.to_thread(self._check_room)

    def writer(self, file_id: str, max_bytes: int = limits.FILE_BYTES_MAX) -> FileWriter:
        """Returns a writer that appends to the file with this id."""
        return FileWriter(self, file_id, max_bytes)

    async def all(self) -> list[StoredFile]:
        """Returns all files, the oldest first."""
        return [one for one in await asyncio.to_thread(self._all) if may_see(one.owner)]

    async def get(self, file_id: str) -> StoredFile:
        """Returns the description of a file. Raises ServiceError('not_found')."""
        found = await asyncio.to_thread(self._read, file_id)
        if found is None or not may_see(found.owner):
            raise ServiceError("not_found", f"No such file: '{file_id}'.", param="file_id")
        return found

    async def delete(self, file_id: str) -> None:
        """Removes a file. Raises ServiceError('not_found')."""
        await self.get(file_id)
        await asyncio.to_thread(self._delete, file_id)

    async def read(self, file_id: str) -> bytes:
        """Returns the data of an existing file, which the caller knows to be small. Raises FileNotFoundError."""
        return await asyncio.to_thread(self.path(file_id).read_bytes)

    def path(self, file_id: str) -> Path:
        """Returns the path of an existing file's data."""
        return self.directory / file_id

    def _make(self) -> Path:
        try:
            if not self._given:
                return temporary.make()
            path = Path(self._given)
            path.mkdir(_DIRECTORY_MODE, parents=True, exist_ok=True)
            return path
        except OSError as error:
            message = "The server's directory for files cannot be used: set it with --files-directory."
            raise ServiceError("internal_error", message) from error

    def _check_room(self) -> None:
        self._remove_abandoned()
        # Files that are being written count with their present size.
        sizes = [one.bytes for one in self._all()] + [_size(path) for path in self._parts()]
        free = shutil.disk_usage(self.directory).free
        too_many = len(sizes) >= limits.FILES_MAX or sum(sizes) >= limits.FILES_BYTES_MAX
        if too_many or free < limits.FILE_BYTES_MAX:
            message = "The server has no room for a further file. Delete files that are not needed."
            raise ServiceError("request_too_large", message, param="file")

    def _remove_abandoned(self) -> None:
        """Removes unfinished files of processes that have ended."""
        for path in self._parts():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime + limits.FILE_ABANDONED_S < self._clock():
                    path.unlink()

    def _parts(self) -> list[Path]:
        return list(self.directory.glob(f"{ID_PREFIX}*{_PART}"))

    def _all(self) -> list[StoredFile]:
        names = [path.name.removesuffix(_DESCRIPTION) for path in self.directory.glob(f"{ID_PREFIX}*{_DESCRIPTION}")]
        found = [one for name in names if (one := self._read(name)) is not None]
        return sorted(found, key=lambda one: (one.created_at, one.id))

    def _read(self, file_id: str) -> StoredFile | None:
        if not _ID.fullmatch(file_id):
            return None
        found = read_record(self.directory / f"{file_id}{_DESCRIPTION}", _DECODER)
        if found is None:
            return None
        if found.expires_at <= self.now():
            self._delete(file_id)
            return None
        return found

    def _delete(self, file_id: str) -> None:
        for name in (f"{file_id}{_DESCRIPTION}", file_id):
            (self.directory / name).unlink(missing_ok=True)


async def to_the_end(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Returns the result of a function that runs in a thread. If cancelled, waits until the function has returned."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **named))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def read_record(path: Path, decoder: "msgspec.json.Decoder[D]") -> D | None:
    """Returns the content of a JSON file; None if the file is missing or damaged. A damaged file is logged."""
    try:
        return decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.error("%s is damaged and is passed over: %s", path, error)
        return None


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file atomically: readers see the old or the new content, even after a crash of the machine."""
    written = path.with_name(f".{path.name}.{new_id()}")
    try:
        with open(written, "xb", opener=_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
