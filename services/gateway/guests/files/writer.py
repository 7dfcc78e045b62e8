"""Writes the data of one file: an upload, or an output file of a batch, which another process may continue."""

import os
import threading
from io import FileIO
from pathlib import Path

import msgspec

from antiphon.services.gateway.guests.files.directory import FileDirectory, StoredFile
from antiphon.services.gateway.guests.files.disk import full_disk_refused, private, to_the_end, write_atomically
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits as file_limits


class FileWriter:
    """Writes a new file, or appends to an unfinished one. Clients see the file after `commit`.

    A cancelled method returns only after its disk operation has ended, so the next method finds a consistent file.
    """

    def __init__(self, directory: FileDirectory, file_id: str, owner: str, max_bytes: int) -> None:
        """`owner`: name of the API key that may use the file."""
        self.id = file_id
        self.num_bytes = 0
        """Number of bytes that this object has been given."""
        self._owner = owner
        self._max_bytes = max_bytes
        self._directory = directory
        self._file: FileIO | None = None
        self._end = 0
        """Number of bytes in the open file. Behind them are zeros up to `_room`, or the rest of a failed write."""
        self._room = 0
        """Size to which the open file may grow without asking for more room: so much is taken on the disk."""
        self._lock = threading.Lock()
        """Held by the thread that writes, so that concurrent writes are not interleaved."""

    @property
    def path(self) -> Path:
        """Path of the data until it is committed."""
        return self._directory.part(self.id, self._owner)

    def reopen(self) -> None:
        """Makes a committed file unfinished again. Has no effect on an unfinished file. Blocks."""
        self.close()
        committed = self._directory.data(self.id)
        if committed.exists():
            self._directory.description(self.id).unlink(missing_ok=True)
            committed.replace(self.path)

    def close(self) -> None:
        """Closes the file, without what is behind its end. It can be opened again."""
        with self._lock:
            if self._file is not None:
                os.ftruncate(self._file.fileno(), self._end)
                self._file.close()
                self._file = None

    async def reserve(self, num_bytes: int) -> None:
        """Takes the room for a new file of this size, also on the disk. Raises ServiceError if there is none."""
        await to_the_end(self._reserve, num_bytes)

    async def write(self, data: bytes) -> None:
        """Appends data. Raises ServiceError if the file becomes too large, or if there is no room for it."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            message = f"The file is larger than {self._max_bytes} bytes."
            raise ServiceError("request_too_large", message, param="file")
        await to_the_end(self._write, data)

    async def commit(self, filename: str, purpose: str, ttl_s: int = file_limits.FILE_TTL_S) -> StoredFile:
        """Publishes the file to clients and returns its description. If it fails, the file stays unfinished.

        `ttl_s`: seconds after which it is deleted.
        """
        return await to_the_end(self._commit, filename, purpose, ttl_s)

    async def abort(self) -> None:
        """Removes what was written."""
        await to_the_end(self._abort)

    def _reserve(self, num_bytes: int) -> None:
        with self._lock, full_disk_refused():
            self._take_room(self._opened(), num_bytes)

    def _write(self, data: bytes) -> None:
        with self._lock, full_disk_refused():
            file, end, rest = self._opened(), self._end, memoryview(data)
            if end + len(data) > self._room:
                self._take_room(file, end + len(data) + file_limits.FILE_STEP_BYTES)
            # Without a buffer, so that what is written survives the process.
            while rest:
                size = os.pwrite(file, rest, end)
                end, rest = end + size, rest[size:]
            self._end = end

    def _take_room(self, file: int, num_bytes: int) -> None:
        with self._directory.taking_room:
            self._directory.check_room(self._owner, self.id, num_bytes)
            if num_bytes:
                os.posix_fallocate(file, 0, num_bytes)
        self._room = num_bytes

    def _commit(self, filename: str, purpose: str, ttl_s: int) -> StoredFile:
        with self._lock:
            self._opened()
        self.close()
        now = self._directory.clock.now()
        described = StoredFile(
            id=self.id,
            bytes=self._end,
            created_at=now,
            expires_at=now + ttl_s,
            filename=filename,
            purpose=purpose,
            owner=self._owner,
        )
        encoded = msgspec.json.encode(described)
        data = self._directory.data(self.id)
        self.path.replace(data)
        try:
            write_atomically(self._directory.description(self.id), encoded)
        except BaseException:
            data.replace(self.path)
            raise
        return described

    def _abort(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def _opened(self) -> int:
        """Opens the file, unless it is open. Returns its descriptor. The lock must be held."""
        if self._file is None:
            self._file = FileIO(self.path, "r+", opener=lambda path, flags: private(path, flags | os.O_CREAT))
            self._end = self._room = os.fstat(self._file.fileno()).st_size
        return self._file.fileno()
