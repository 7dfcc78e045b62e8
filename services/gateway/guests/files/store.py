"""The uploaded files and the output files of batches, for the API key that a call has. Work on the disk is in threads.

Gateways that share a directory have the same files.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from antiphon.services.gateway.edge.access.call import current_call, may_see, new_id
from antiphon.services.gateway.guests.files import temporary
from antiphon.services.gateway.guests.files.clock import WallClock
from antiphon.services.gateway.guests.files.directory import ID_PREFIX, FileDirectory, StoredFile
from antiphon.services.gateway.guests.files.writer import FileWriter
from antiphon.services.gateway.guests.offers import UploadedFiles
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits as file_limits


class FileStore(UploadedFiles):
    """The files in one directory. A call (`access.call`) finds only the files that its key may see."""

    def __init__(
        self,
        directory: str = "",
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory` is made when the first file is written; "": a temporary one, deleted at the end of the process.

        `wall` returns Unix seconds.
        """
        self._given = directory
        self.clock = WallClock(wall, monotonic)
        self._directory = FileDirectory(directory, self.clock)

    @property
    def directory(self) -> Path:
        """The directory. Made at the first call; raises ServiceError if it cannot be made."""
        return self._directory.path

    async def remove_leftovers(self) -> None:
        """Removes the temporary directories of gateways that were killed. Called when a gateway starts."""
        if not self._given:
            await asyncio.to_thread(temporary.remove_leftovers)

    def may_have_files(self) -> bool:
        """Whether there may be files of an earlier process. Does not make the directory."""
        return bool(self._given) and Path(self._given).is_dir()

    def now(self) -> int:
        """Returns the time in Unix seconds."""
        return self.clock.now()

    def names(self, prefix: str) -> set[str]:
        """Returns the names in the directory that begin with `prefix`. Blocks."""
        return self._directory.names(prefix)

    async def create(self, num_bytes: int = 0) -> FileWriter:
        """Starts a new file of the current call's key. `num_bytes`: its size, if it is known, as far as it is allowed.

        Raises ServiceError if there is no room for it: 'request_too_large', or 'server_is_overloaded' if the disk is
        full.
        """
        writer = self.writer(ID_PREFIX + new_id(), current_call().key.name)
        try:
            await writer.reserve(min(num_bytes, file_limits.FILE_BYTES_MAX))
        except BaseException:
            await writer.abort()
            raise
        return writer

    async def check_room(self, owner: str) -> None:
        """Raises ServiceError('request_too_large') if there is no room for a further file of a key."""
        await asyncio.to_thread(self._directory.check_room, owner, "", file_limits.FILE_STEP_BYTES)

    def writer(self, file_id: str, owner: str, max_bytes: int = file_limits.FILE_BYTES_MAX) -> FileWriter:
        """Returns a writer that appends to the file with this id."""
        return FileWriter(self._directory, file_id, owner, max_bytes)

    async def all(self) -> list[StoredFile]:
        """Returns all files, the oldest first."""
        return [one for one in await asyncio.to_thread(self._directory.all) if may_see(one.owner)]

    async def get(self, file_id: str) -> StoredFile:
        """Returns the description of a file. Raises ServiceError('not_found')."""
        found = await asyncio.to_thread(self._directory.get, file_id)
        if found is None or not may_see(found.owner):
            raise ServiceError("not_found", f"No such file: '{file_id}'.", param="file_id")
        return found

    async def delete(self, file_id: str) -> None:
        """Removes a file. Raises ServiceError('not_found')."""
        await self.get(file_id)
        await asyncio.to_thread(self._directory.delete, file_id)

    async def read(self, file_id: str) -> bytes:
        """Returns the data of an existing file, which the caller knows to be small. Raises FileNotFoundError."""
        return await asyncio.to_thread(self.path(file_id).read_bytes)

    def path(self, file_id: str) -> Path:
        """Returns the path of an existing file's data."""
        return self._directory.data(file_id)
