"""Runs one batch: checks its input, sends its requests to the application, writes the answers to two files.

Answers are written as they arrive. If the gateway ends, another one (or the same one after a restart) continues the
batch and does not repeat requests whose answers are in the files.
"""

import asyncio
import contextlib
import logging
from typing import Any

from antiphon.services.gateway.edge.access.call import Call, serving
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.edge.http.in_process import InProcessClient
from antiphon.services.gateway.guests.batches.answers import keep_whole_answers
from antiphon.services.gateway.guests.batches.places import Places
from antiphon.services.gateway.guests.batches.record import BatchRecord, LineError, Status
from antiphon.services.gateway.guests.batches.requests import InputCheck, RequestReader, Waiting
from antiphon.services.gateway.guests.batches.store import BatchStore
from antiphon.services.gateway.guests.files.disk import in_pieces, to_the_end
from antiphon.services.gateway.guests.files.writer import FileWriter
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits as file_limits
from antiphon.shared.files.batch_lines import RETRIED, answered, encoded_answer, unanswered

log = logging.getLogger(__name__)
TICK_S = 1.0
"""Interval at which a running batch is saved and checked for cancellation and expiry, seconds."""
_PAUSE_S, _PAUSE_MAX_S = 0.5, 30.0
"""Pause before a request is sent again because the server is overloaded; it doubles up to the second value. Seconds."""
_PURPOSE = "batch_output"
_INPUT_GONE = LineError(code="invalid_input_file", message="The input file is not there any more.")
_FAILURE = LineError(code="internal_error", message="The server had an error while it ran the batch.")
_DIED = LineError(
    code="gateway_failure",
    message="The server ended again and again while it ran the batch, before there was a further answer. A request of "
    "the batch may be the reason: leave out what is unusual in them.",
)
_EXPIRED = "This request could not be executed before the completion window expired."


class _StopSending(Exception):
    """Cancels the requests in progress, because the batch is cancelled or has expired."""


class BatchRun:
    """One batch that this gateway runs. The gateway must hold the lock of the batch."""

    def __init__(
        self, record: BatchRecord, store: BatchStore, client: InProcessClient, keys: ApiKeys, places: Places
    ) -> None:
        """`keys`: for looking up the key of the batch. `places`: of the running requests of all batches."""
        self.record = record
        self._store = store
        self._client = client
        self._keys = keys
        self._places = places
        most = file_limits.BATCH_OUTPUT_BYTES_MAX
        self._output = store.files.writer(record.output_file_id, record.key, most)
        self._errors = store.files.writer(record.error_file_id, record.key, most)
        self._answered = set[int]()
        """Hashes of the custom ids whose answers are written."""
        self._pending: list[Waiting] = []
        self._reading = asyncio.Lock()
        self._num_sending = 0
        self._changed = asyncio.Event()
        """Set when the batch is cancelled, or when all its requests are answered."""

    async def run(self) -> None:
        """Runs the batch to its end and releases its lock. If the run fails, the batch becomes `failed`.

        If its state cannot be recorded, as on a full disk, it stays unfinished and is continued when somebody asks.
        """
        try:
            try:
                await self._run()
            except FileNotFoundError:
                await self._fail(_INPUT_GONE)
            except ServiceError as error:
                if error.retryable:
                    raise
                await self._fail(LineError(code=error.code, message=error.message))
            except Exception:
                log.exception("the batch %s failed", self.record.id)
                await self._fail(_FAILURE)
            await self._save()
        except (OSError, ServiceError) as error:
            log.error("the batch %s stops until somebody asks for it: %s", self.record.id, error)
        finally:
            for writer in (self._output, self._errors):
                writer.close()
            await self._store.release(self.record)

    def cancel(self) -> None:
        """Makes the batch end as `cancelled`. Has no effect if it is about to end."""
        if self.record.status in ("validating", "in_progress"):
            self.record.enter("cancelling", self._now())
            self._changed.set()

    async def _run(self) -> None:
        if self.record.starts > 1:
            await self._save()
        if self.record.starts > limits.STARTS_MAX:
            await self._fail(_DIED)
            return
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
        """Ends the batch as failed, with the answers so far, unless a gateway has died while it kept them."""
        self.record.errors.append(error)
        try:
            if self.record.starts <= limits.STARTS_MAX + 1:
                await self._find_answered()
                await self._keep_answers()
        except Exception:
            log.exception("the answers of the failed batch %s cannot be kept", self.record.id)
        self.record.enter("failed", self._now())

    async def _validate(self) -> bool:
        """Checks the input file. Returns whether the batch can run."""
        check = InputCheck(self._store.files.path(self.record.input_file_id), self.record.endpoint)
        try:
            await in_pieces(check.steps())
        except FileNotFoundError:
            check.errors.append(_INPUT_GONE)
        self.record.total, self.record.errors = check.total, check.errors
        if check.errors:
            self.record.enter("failed", self._now())
            return False
        if self.record.status == "validating":
            self.record.enter("in_progress", self._now())
        await self._save()
        return True

    async def _find_answered(self) -> None:
        """Counts the answers that this run or an earlier one has written."""
        self._answered = set[int]()
        for writer in (self._output, self._errors):
            await to_the_end(writer.reopen)
        await in_pieces(keep_whole_answers(self._output.path, self._answered))
        self.record.completed = len(self._answered)
        await in_pieces(keep_whole_answers(self._errors.path, self._answered))
        self.record.failed = len(self._answered) - self.record.completed

    # --- sending ---

    async def _send_until_stopped(self) -> Status:
        """Sends the requests. Returns the state in which the batch ends: completed, cancelled or expired."""
        reader = self._reader()
        ended: Status | None = None
        try:
            if (ended := await self._why_to_stop()) is None:
                # A task group cancels each of its tasks at most once; a cancelled write relies on this to complete.
                async with asyncio.TaskGroup() as group:
                    self._num_sending = file_limits.BATCH_CONCURRENCY
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

    def _reader(self) -> RequestReader:
        path = self._store.files.path(self.record.input_file_id)
        return RequestReader(path, self.record.endpoint, frozenset(self._answered))

    async def _why_to_stop(self) -> Status | None:
        """Returns the final state if the batch must stop early (cancelled or expired); None if it goes on."""
        if await self._store.is_cancelled(self.record.id):
            self.cancel()
        if self.record.status == "cancelling":
            return "cancelled"
        return "expired" if self.record.expires_at <= self._store.files.clock.certain() else None

    async def _until_changed(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._changed.wait()

    async def _send_next(self, reader: RequestReader) -> None:
        """Sends one request after the other until no requests are left."""
        while (waiting := await self._next_request(reader)) is not None:
            data, is_good = encoded_answer(await self._send(waiting, reader))
            # Counted before the write, because a cancelled write is still completed.
            self._answered.add(hash(waiting.custom_id))
            self.record.completed += is_good
            self.record.failed += not is_good
            await (self._output if is_good else self._errors).write(data)
            self.record.starts = 0
        self._num_sending -= 1
        if not self._num_sending:
            self._changed.set()

    async def _next_request(self, reader: RequestReader) -> Waiting | None:
        async with self._reading:
            while not self._pending and not reader.has_ended:
                self._pending = await to_the_end(reader.next)
            return self._pending.pop(0) if self._pending else None

    async def _send(self, waiting: Waiting, reader: RequestReader) -> dict[str, Any]:
        """Sends a request, and repeats it while the server is overloaded. Returns the output line with its answer.

        Raises ServiceError if the key of the batch is gone or may not use the endpoint any more.
        """
        pause_s = _PAUSE_S
        while True:
            async with self._places.taken(waiting.num_bytes):
                _, url, body = await to_the_end(reader.request, waiting)
                # The key is looked up for each request, because its permissions may change; the key file of this
                # gateway applies.
                call = Call(key=self._keys.named(self.record.key, url), in_batch=True, idle_s=self._idle_s())
                with serving(call):
                    response = await self._client.post(url, body)
            if response.status not in RETRIED:
                return answered(waiting.custom_id, response.status, response.request_id, response.body)
            del body  # Not held while it waits without a place.
            await asyncio.sleep(min(max(pause_s, response.retry_after_s), _PAUSE_MAX_S))
            pause_s *= 2

    def _idle_s(self) -> float:
        """Returns the time for which a request runs in the idle lane, seconds; 0 if the batch expires soon."""
        return max(0.0, self.record.expires_at - file_limits.BATCH_ORDINARY_S - self._now())

    async def _expire_the_rest(self) -> None:
        """Writes an error for each request that is not answered."""
        reader = self._reader()
        try:
            while not reader.has_ended:
                rest = await to_the_end(reader.next)
                lines = [encoded_answer(unanswered(one.custom_id, "batch_expired", _EXPIRED))[0] for one in rest]
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
        await writer.commit(f"{self.record.id}_{what}.jsonl", _PURPOSE)
        return True

    async def _save(self) -> None:
        await self._store.put(self.record)

    def _now(self) -> int:
        return self._store.files.now()
