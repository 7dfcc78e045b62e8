"""The batches of one gateway: starts new ones, and continues those whose gateway has ended.

A batch is continued when a gateway starts, or when a client asks any gateway for the batch. A batch always runs with
the API key that created it. A call (`access.call`) finds only the batches that its key may see.
"""

import asyncio
import logging

from antiphon.services.gateway.edge.access.call import current_call, may_see, new_id
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.edge.http.in_process import InProcessClient
from antiphon.services.gateway.guests.batches.places import Places
from antiphon.services.gateway.guests.batches.record import BatchRecord
from antiphon.services.gateway.guests.batches.runner import BatchRun
from antiphon.services.gateway.guests.batches.store import ID_PREFIX, BatchStore, unknown_batch
from antiphon.services.gateway.guests.files.directory import ID_PREFIX as FILE_PREFIX
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits as file_limits
from antiphon.shared.request.checks import refuse

log = logging.getLogger(__name__)
_INPUT_PURPOSE = "batch"


class Batches:
    """Starts, finds and cancels batches."""

    def __init__(self, store: BatchStore, client: InProcessClient, keys: ApiKeys) -> None:
        self._store = store
        self._client = client
        self._keys = keys
        self._places = Places()
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def continue_all(self) -> None:
        """Continues all batches that no gateway runs. Called once, when the gateway can answer requests.

        First removes temporary directories of killed gateways.
        """
        await self._store.files.remove_leftovers()
        if not self._store.files.may_have_files():
            return
        try:
            await self.all()
        except (OSError, ServiceError) as error:
            log.warning("batches of an earlier gateway are not continued: %s", error)

    async def create(self, input_file_id: str, endpoint: str, metadata: dict[str, str]) -> BatchRecord:
        """Starts a batch. Raises ServiceError if the file is no input file, or if too many batches run."""
        if (await self._store.files.get(input_file_id)).purpose != _INPUT_PURPOSE:
            refuse("input_file_id", f"must name a file with the purpose '{_INPUT_PURPOSE}'")
        now = self._store.files.now()
        record = BatchRecord(
            id=ID_PREFIX + new_id(),
            endpoint=endpoint,
            input_file_id=input_file_id,
            output_file_id=FILE_PREFIX + new_id(),
            error_file_id=FILE_PREFIX + new_id(),
            created_at=now,
            expires_at=now + file_limits.BATCH_WINDOW_S,
            key=current_call().key.name,
            metadata=metadata,
        )
        await self._store.create(record)
        self._start(record)
        return record

    async def get(self, batch_id: str) -> BatchRecord:
        """Returns a batch's current state. Continues the batch if no gateway runs it.

        Raises ServiceError('not_found').
        """
        record = await self._store.get(batch_id)
        if not may_see(record.key):
            raise unknown_batch(batch_id)
        return await self._current(record)

    async def all(self) -> list[BatchRecord]:
        """Returns all batches, the oldest first. Continues those that no gateway runs."""
        return [await self._current(record) for record in await self._store.all() if may_see(record.key)]

    async def cancel(self, batch_id: str) -> BatchRecord:
        """Cancels a batch. Raises ServiceError: 'not_found', or 'invalid_value' if it has ended."""
        record = await self.get(batch_id)
        if record.is_final:
            refuse("batch_id", f"names a batch that cannot be cancelled: it is {record.status}")
        # The request to cancel is always written to disk, because the gateway that runs the batch may end before it
        # stops the batch.
        await self._store.ask_to_cancel(batch_id)
        if run := self._runs.get(batch_id):
            run.cancel()
            return run.record
        record.enter("cancelling", self._store.files.now())
        return record

    async def _current(self, record: BatchRecord) -> BatchRecord:
        """Returns the newest state of a batch; continues it if it is unfinished and no gateway runs it."""
        if record.id not in self._runs and not record.is_final and len(self._runs) < file_limits.BATCHES_UNFINISHED_MAX:
            record = await self._continue(record)
        run = self._runs.get(record.id)
        return record if run is None else run.record

    async def _continue(self, record: BatchRecord) -> BatchRecord:
        if not (taken := await self._store.take(record.id)):
            return record
        try:
            # The gateway that held the lock may have finished the batch since the record was read.
            record = await self._store.get(record.id)
        except BaseException:
            await self._store.release(record)
            raise
        if record.is_final:
            await self._store.release(record)
        else:
            record.starts += taken == "left behind"
            self._start(record)
        return record

    def _start(self, record: BatchRecord) -> None:
        self._runs[record.id] = BatchRun(record, self._store, self._client, self._keys, self._places)
        task = asyncio.create_task(self._run(record.id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch_id: str) -> None:
        try:
            await self._runs[batch_id].run()
        finally:
            del self._runs[batch_id]
