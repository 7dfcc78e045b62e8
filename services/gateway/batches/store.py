"""Stores the records of batches in the directory of files. A lock file shows which gateway runs a batch.

A gateway that runs a batch holds a lock on its file `ID.lock`. The operating system releases the lock when the process
ends, however it ends; then another gateway, or the same one after a restart, can continue the batch. All work on the
disk is done in threads.
"""

import asyncio
import fcntl
import os
import re
from pathlib import Path

import msgspec

from services.gateway.batches.record import BatchRecord
from services.gateway.files.store import FileStore, read_record, to_the_end, write_atomically
from shared import limits
from shared.errors import ServiceError

ID_PREFIX = "batch_"
_ID = re.compile(r"batch_[A-Za-z0-9]{22}")
_RECORD, _LOCK, _CANCEL = ".json", ".lock", ".cancel"
_DECODER = msgspec.json.Decoder(BatchRecord)


class BatchStore:
    """The records of the batches in the directory of a file store."""

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self._locks: dict[str, int] = {}
        """File descriptors of the locks that this process holds, by batch."""

    async def put(self, record: BatchRecord) -> None:
        """Writes a record.

        If cancelled, returns only after the record is written, so that it cannot overwrite a later record.
        """
        data = msgspec.json.encode(record)
        await to_the_end(write_atomically, self._path(record.id, _RECORD), data)

    async def get(self, batch_id: str) -> BatchRecord:
        """Returns a record. Raises ServiceError('not_found')."""
        found = await asyncio.to_thread(self._read, batch_id)
        if found is None:
            raise unknown_batch(batch_id)
        return found

    async def all(self) -> list[BatchRecord]:
        """Returns all records, the oldest first. Deletes records that are older than the lifetime of files."""
        return await asyncio.to_thread(self._all)

    async def create(self, record: BatchRecord) -> None:
        """Takes the lock of a new batch and writes its record.

        If there are too many records, the oldest records of ended batches are deleted; their files are kept. Raises
        ServiceError if the directory has no room for the output of the batch, or for its record.
        """
        await self.files.check_room()
        await asyncio.to_thread(self._make_room)
        taken = await self.take(record.id)
        assert taken, record.id
        try:
            await self.put(record)
        except BaseException:
            await self.release(record)
            raise

    async def take(self, batch_id: str) -> bool:
        """Tries to take the lock of a batch. Returns whether this call has acquired it."""
        return await asyncio.to_thread(self._take, batch_id)

    async def release(self, record: BatchRecord) -> None:
        """Releases the lock of a batch. If the batch has ended, also removes files that only its run needs.

        If cancelled, returns only after the lock is released.
        """
        await to_the_end(self._release, record)

    async def ask_to_cancel(self, batch_id: str) -> None:
        """Records the request to cancel a batch, for the gateway that runs or will continue it."""
        await asyncio.to_thread(self._path(batch_id, _CANCEL).touch, 0o600)

    async def is_cancelled(self, batch_id: str) -> bool:
        """Whether cancelling the batch has been requested."""
        return await asyncio.to_thread(self._path(batch_id, _CANCEL).exists)

    def _make_room(self) -> None:
        records = self._all()
        ended = iter([one for one in records if one.is_final])
        for _ in range(len(records) + 1 - limits.BATCHES_MAX):
            oldest = next(ended, None)
            if oldest is None:
                raise ServiceError("server_is_overloaded", "Too many batches are not finished. Try again later.")
            self._forget(oldest.id)

    def _all(self) -> list[BatchRecord]:
        paths = self.files.directory.glob(f"{ID_PREFIX}*{_RECORD}")
        found = [one for path in paths if (one := self._read(path.name.removesuffix(_RECORD))) is not None]
        return sorted(found, key=lambda one: (one.created_at, one.id))

    def _read(self, batch_id: str) -> BatchRecord | None:
        if not _ID.fullmatch(batch_id):
            return None
        path = self._path(batch_id, _RECORD)
        found = read_record(path, _DECODER)
        if found is None:
            return None
        if found.is_final and found.created_at + limits.FILE_TTL_S <= self.files.now():
            self._forget(batch_id)
            return None
        return found

    def _forget(self, batch_id: str) -> None:
        for suffix in (_RECORD, _CANCEL):
            self._path(batch_id, suffix).unlink(missing_ok=True)

    def _take(self, batch_id: str) -> bool:
        if batch_id in self._locks:
            return False
        path = self._path(batch_id, _LOCK)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the lock file after this process opened it. Others would then lock a new
            # file.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                self._locks[batch_id] = descriptor
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return False

    def _release(self, record: BatchRecord) -> None:
        try:
            for suffix in (_CANCEL, _LOCK) if record.is_final else (_LOCK,):
                self._path(record.id, suffix).unlink(missing_ok=True)
        finally:
            os.close(self._locks.pop(record.id))

    def _path(self, batch_id: str, suffix: str) -> Path:
        return self.files.directory / f"{batch_id}{suffix}"


def unknown_batch(batch_id: str) -> ServiceError:
    """Returns the error for an unknown batch id."""
    return ServiceError("not_found", f"No such batch: '{batch_id}'.", param="batch_id")
