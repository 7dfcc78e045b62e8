"""Runs one batch: checks its input, sends its requests to the application, writes the answers to two files.

Answers are written as they arrive. If the gateway ends, another one (or the same one after a restart) continues the
batch and does not repeat requests whose answers are in the files.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Set
from typing import Any

import msgspec

from services.gateway.access.call import Call, serving
from services.gateway.batches import requests
from services.gateway.batches.record import BatchRecord, LineError, Status
from services.gateway.batches.requests import RequestReader
from services.gateway.batches.store import BatchStore
from services.gateway.files.store import FileWriter, to_the_end
from services.gateway.http.auth import ApiKeys
from services.gateway.http.in_process import InProcessClient
from shared import limits
from shared.errors import ServiceError
from shared.request.batch_lines import RETRIED, BatchRequest, answered, is_good, read_answers, unanswered

log = logging.getLogger(__name__)
TICK_S = 1.0
"""Interval at which a running batch is saved and checked for cancellation and expiry, seconds."""
_PAUSE_S, _PAUSE_MAX_S = 0.5, 30.0
"""Pause before a request is sent again because the server is overloaded; it doubles up to the second value. Seconds."""
_PURPOSE = "batch_output"
_INPUT_GONE = LineError(code="invalid_input_file", message="The input file is not there any more.")
_FAILURE = LineError(code="internal_error", message="The server had an error while it ran the batch.")
_EXPIRED = "This request could not be executed before the completion window expired."


class _StopSending(Exception):
    """Cancels the requests in progress, because the batch is cancelled or has expired."""


class BatchRun:
    """One batch that this gateway runs. The gateway must hold the lock of the batch."""

    def __init__(
        self, record: BatchRecord, store: BatchStore, client: InProcessClient, keys: ApiKeys, slots: asyncio.Semaphore
    ) -> None:
        """`keys`: for looking up the key of the batch. `slots`: limits the running requests of all batches."""
        self.record = record
        self._store = store
        self._client = client
        self._keys = keys
        self._slots = slots
        self._output = store.files.writer(record.output_file_id, limits.BATCH_OUTPUT_BYTES_MAX)
        self._errors = store.files.writer(record.error_file_id, limits.BATCH_OUTPUT_BYTES_MAX)
        self._answered = set[str]()
        self._pending: list[BatchRequest] = []
        self._reading = asyncio.Lock()
        self._num_sending = 0
        self._changed = asyncio.Event()
        """Set when the batch is cancelled, or when all its requests are answered."""

    async def run(self) -> None:
        """Runs the batch to its end and releases its lock. If the run fails, the batch becomes `failed`."""
        try:
            try:
                await self._run()
            except FileNotFoundError:
                await self._fail(_INPUT_GONE)
            except ServiceError as error:
                await self._fail(LineError(code=error.code, message=error.message))
            except Exception:
                log.exception("the batch %s failed", self.record.id)
                await self._fail(_FAILURE)
            await self._save()
        except (OSError, ServiceError) as error:
            log.error("the end of the batch %s cannot be recorded: %s", self.record.id, error)
        finally:
            await self._store.release(self.record)

    def cancel(self) -> None:
        """Makes the batch end as `cancelled`. Has no effect if it is about to end."""
        if self.record.status in ("validating", "in_progress"):
            self.record.enter("cancelling", self._now())
            self._changed.set()

    async def _run(self) -> None:
        if self.record.status == "validating" and not await self._validate():
            return
        await self._find_answered()
        ended = await self._send_until_stopped()
        if ended != "cancelled":
            self.record.enter("finalizing", self._now())
            await self._save()
        if ended == "expired":
            await self._expire_the_rest()
        await self._keep_answers()
        self.record.enter(ended, self._now())

    async def _fail(self, error: LineError) -> None:
        """Ends the batch as failed, with the answers so far."""
        self.record.errors.append(error)
        try:
            await self._find_answered()
            await self._keep_answers()
        except Exception:
            log.exception("the answers of the failed batch %s cannot be kept", self.record.id)
        self.record.enter("failed", self._now())

    async def _validate(self) -> bool:
        """Checks the input file. Returns whether the batch can run."""
        path = self._store.files.path(self.record.input_file_id)
        try:
            checked = await asyncio.to_thread(requests.check, path, self.record.endpoint)
        except FileNotFoundError:
            checked = requests.Checked(0, [_INPUT_GONE])
        self.record.total, self.record.errors = checked.total, checked.errors
        if checked.errors:
            self.record.enter("failed", self._now())
            return False
        if self.record.status == "validating":
            self.record.enter("in_progress", self._now())
        await self._save()
        return True

    async def _find_answered(self) -> None:
        """Counts the answers that this run or an earlier one has written."""
        good = await asyncio.to_thread(_read_part, self._output)
        bad = await asyncio.to_thread(_read_part, self._errors)
        self._answered = good | bad
        self.record.completed, self.record.failed = len(good), len(bad)

    # --- sending ---

    async def _send_until_stopped(self) -> Status:
        """Sends the requests. Returns the state in which the batch ends: completed, cancelled or expired."""
        reader = self._reader(frozenset(self._answered))
        ended: Status | None = None
        try:
            if (ended := await self._why_to_stop()) is None:
                # A task group cancels each of its tasks at most once; a cancelled write relies on this to complete.
                async with asyncio.TaskGroup() as group:
                    self._num_sending = limits.BATCH_CONCURRENCY
                    for _ in range(self._num_sending):
                        group.create_task(self._send_next(reader))
                    while self._num_sending and (ended := await self._why_to_stop()) is None:
                        await self._save()
                        await self._until_changed()
                    if self._num_sending:
                        raise _StopSending
        except ExceptionGroup as failed:
            error = next((one for one in failed.exceptions if not isinstance(one, _StopSending)), None)
            if error is not None:
                raise error from None
        finally:
            reader.close()
        return ended or "completed"

    def _reader(self, answered: Set[str]) -> RequestReader:
        return RequestReader(self._store.files.path(self.record.input_file_id), self.record.endpoint, answered)

    async def _why_to_stop(self) -> Status | None:
        """Returns the final state if the batch must stop early (cancelled or expired); None if it goes on."""
        if await self._store.is_cancelled(self.record.id):
            self.cancel()
        if self.record.status == "cancelling":
            return "cancelled"
        return "expired" if self._now() >= self.record.expires_at else None

    async def _until_changed(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._changed.wait()

    async def _send_next(self, reader: RequestReader) -> None:
        """Sends one request after the other until no requests are left."""
        while (request := await self._next_request(reader)) is not None:
            line = await self._send(request)
            good = is_good(line)
            # Counted before the write, because a cancelled write is still completed.
            self._answered.add(request.custom_id)
            self.record.completed += good
            self.record.failed += not good
            await (self._output if good else self._errors).write(_encode(line))
        self._num_sending -= 1
        if not self._num_sending:
            self._changed.set()

    async def _next_request(self, reader: RequestReader) -> BatchRequest | None:
        async with self._reading:
            if not self._pending:
                self._pending = await to_the_end(reader.next, limits.BATCH_CONCURRENCY)
            return self._pending.pop(0) if self._pending else None

    async def _send(self, request: BatchRequest) -> dict[str, Any]:
        """Sends a request, and repeats it while the server is overloaded. Returns the output line with its answer.

        Raises ServiceError if the key of the batch is gone or may not use the endpoint any more.
        """
        body, pause_s = requests.encoded_body(request), _PAUSE_S
        while True:
            async with self._slots:
                # The key is looked up for each request, because its permissions may change; the key file of this
                # gateway applies.
                call = Call(self._keys.named(self.record.key, request.url), in_batch=True, idle_s=self._idle_s())
                with serving(call):
                    response = await self._client.post(request.url, body)
            if response.status not in RETRIED:
                return answered(request.custom_id, response.status, response.request_id, json.loads(response.body))
            await asyncio.sleep(min(max(pause_s, response.retry_after_s), _PAUSE_MAX_S))
            pause_s *= 2

    def _idle_s(self) -> float:
        """Returns the time for which a request runs in the idle lane, seconds; 0 if the batch expires soon."""
        return max(0.0, self.record.expires_at - limits.BATCH_ORDINARY_S - self._now())

    async def _expire_the_rest(self) -> None:
        """Writes an error for each request that is not answered."""
        reader = self._reader(self._answered)
        try:
            while rest := await to_the_end(reader.next, limits.BATCH_CONCURRENCY):
                lines = [_encode(unanswered(one.custom_id, "batch_expired", _EXPIRED)) for one in rest]
                await self._errors.write(b"".join(lines))
                self.record.failed += len(rest)
        finally:
            reader.close()

    # --- output ---

    async def _keep_answers(self) -> None:
        """Commits the output file and the error file."""
        self.record.has_output = await self._commit(self._output, self.record.completed, "output")
        self.record.has_errors = await self._commit(self._errors, self.record.failed, "errors")

    async def _commit(self, writer: FileWriter, num_lines: int, what: str) -> bool:
        """Commits an output file. If it would be empty, creates no file and returns False."""
        if not num_lines:
            await writer.abort()
            return False
        await writer.commit(f"{self.record.id}_{what}.jsonl", _PURPOSE, self.record.key)
        return True

    async def _save(self) -> None:
        await self._store.put(self.record)

    def _now(self) -> int:
        return self._store.files.now()


def _read_part(writer: FileWriter) -> set[str]:
    """Returns the custom ids in the output file of an earlier run. Removes an incomplete last line from the file.

    The earlier run may have ended before it could record that the file is complete.
    """
    writer.reopen()
    try:
        data = writer.path.read_bytes()
    except FileNotFoundError:
        return set()
    whole, found = read_answers(data)
    if len(whole) < len(data):
        writer.path.write_bytes(whole)
    return set(found)


def _encode(line: dict[str, Any]) -> bytes:
    return msgspec.json.encode(line) + b"\n"
