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
from typing import Literal

import msgspec

from antiphon.services.gateway.guests.batches.record import BatchRecord
from antiphon.services.gateway.guests.files.disk import private, to_the_end, write_atomically
from antiphon.services.gateway.guests.files.records import SUFFIX, Records
from antiphon.services.gateway.guests.files.store import FileStore
from antiphon.shared.actors.fair_work import leaves_room
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits as file_limits
from antiphon.shared.structures.kept import Kept

ID_PREFIX = "batch_"
_ID = re.compile(r"batch_[A-Za-z0-9]{22}")
_LOCK, _CANCEL = ".lock", ".cancel"
_RETRY_AFTER_S = 30.0
Taken = Literal["", "in order", "left behind"]
"""A lock that could not be taken; one that was free; one whose process ended without `release` while it ran the batch.
"""


class BatchStore:
    """The records of the batches in the directory of a file store."""

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self._locks: dict[str, int] = {}
        """File descriptors of the locks that this process holds, by batch."""
        self._records = Records(
            lambda: files.directory, msgspec.json.Decoder(BatchRecord), lambda record: record.is_final
        )
        self._creating = asyncio.Lock()

    async def put(self, record: BatchRecord) -> None:
        """Writes a record.

        If cancelled, returns only after the record is written, so that it cannot overwrite a later record.
        """
        data = msgspec.json.encode(record)
        await to_the_end(write_atomically, self._records.path(record.id), data)

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

        If there are too many records, records of ended batches are deleted; their files are kept. Raises ServiceError
        if its key has too many unfinished batches, or if the directory has no room for its output or its record.
        """
        async with self._creating:
            await self.files.check_room(record.key)
            await asyncio.to_thread(self._make_room, record.key)
            taken = await self.take(record.id)
            assert taken, record.id
            try:
                await self.put(record)
            except BaseException:
                await self.release(record)
                raise

    async def take(self, batch_id: str) -> Taken:
        """Tries to take the lock of a batch. Returns "" if another call or process has it."""
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

    def _make_room(self, key: str) -> None:
        records = self._all()
        unfinished = [one.key for one in records if not one.is_final]
        held, total = unfinished.count(key) + 1, len(unfinished) + 1
        if not leaves_room(key, held, total, file_limits.BATCHES_UNFINISHED_MAX):
            message = "Too many batches are not finished. Try again later."
            raise ServiceError("server_is_overloaded", message, retry_after_s=_RETRY_AFTER_S)
        kept = Kept(len(records))
        for one in records:
            if one.is_final:
                kept.put(one.key, one.id, 1)
        kept.max_bytes = max(0, file_limits.BATCHES_MAX - total)
        for batch_id in kept.shrink():
            self._forget(batch_id)

    def _all(self) -> list[BatchRecord]:
        names = self.files.names(ID_PREFIX)
        found = [one for one in self._records.all(names).values() if not self._is_forgotten(one)]
        return sorted(found, key=lambda one: (one.created_at, one.id))

    def _read(self, batch_id: str) -> BatchRecord | None:
        found = self._records.read(batch_id) if _ID.fullmatch(batch_id) else None
        return None if found is None or self._is_forgotten(found) else found

    def _is_forgotten(self, record: BatchRecord) -> bool:
        """Whether a batch has ended and is older than the lifetime of files. Deletes its record if that is certain."""
        if not record.is_final:
            return False
        end = record.created_at + file_limits.FILE_TTL_S
        if end <= self.files.clock.certain():
            self._forget(record.id)
        return end <= self.files.clock.now()

    def _forget(self, batch_id: str) -> None:
        for suffix in (SUFFIX, _CANCEL):
            self._path(batch_id, suffix).unlink(missing_ok=True)

    def _take(self, batch_id: str) -> Taken:
        if batch_id in self._locks:
            return ""
        path = self._path(batch_id, _LOCK)
        try:
            descriptor, taken = private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "in order"
        except FileExistsError:
            descriptor, taken = private(path, os.O_RDWR | os.O_CREAT), "left behind"
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the lock file after this process opened it. Others would then lock a new
            # file.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                self._locks[batch_id] = descriptor
                return taken
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return ""

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
