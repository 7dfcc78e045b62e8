"""The log on a NATS server with JetStream. Made by `nats.NatsTransport`."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Generator

from nats import errors
from nats.aio.client import Client
from nats.js.errors import APIError, NotFoundError

from antiphon.shared import limits
from antiphon.shared.bus.durable_log import BATCH_MESSAGES, LogConfig, Logged, LogUnavailableError
from antiphon.shared.bus.nats_stores import existing

log = logging.getLogger(__name__)
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_EXPIRES = {"Nats-TTL": f"{limits.LOG_EMPTY_S:.0f}s"}
"""Header of a message that is dropped early. Servers before 2.11 keep it as long as others."""
_REPLACES = {"Nats-Rollup": "sub"}
"""Header of a message that replaces all others of its subject, in a log that allows this."""
_WRONG_LAST = 10071
"""The server's error code if the last sequence number of a subject is not the expected one."""
_BATCH_BYTES = 4 * 2**20
"""Approximate size after which the server ends a batch."""
_PENDING = "Nats-Num-Pending"
"""Header of servers that send batches: number of messages that follow."""
_END_OF_BATCH, _NOT_FOUND = "204", "404"


class NatsDurableLog:
    """Implements `durable_log.DurableLog`."""

    def __init__(self, client: Client, config: LogConfig, timeout_s: float) -> None:
        self._client = client
        self._stream = client.jetstream(timeout=timeout_s)  # pyright: ignore[reportUnknownMemberType]
        self._config, self._timeout_s = config, timeout_s
        self._is_open = False

    async def open(self) -> None:
        """See DurableLog."""
        try:
            info = await existing(lambda: self._stream.stream_info(self._config.name), self._timeout_s)
        except errors.Error as error:
            raise self._unavailable(error) from error
        if self._config.storage == "file" and not self._is_open:
            # The server does not tell whether messages were lost.
            found = info.state.messages, info.state.bytes
            log.info("the log %s has %d messages, %d bytes", self._config.name, *found)
        self._is_open = True

    async def _ready(self) -> None:
        """Opens the log if it has not been opened, or has not answered since, as after a restart of the server."""
        if not self._is_open:
            await self.open()

    async def append(self, subject: str, payload: bytes, *, last: int | None = None) -> int | None:
        """See DurableLog."""
        return await self._publish(subject, payload, {}, last)

    async def clear(self, subject: str, *, last: int | None = None) -> None:
        """See DurableLog."""
        await self._publish(subject, b"", _EXPIRES | _REPLACES if self._config.clears else _EXPIRES, last)

    async def _publish(self, subject: str, payload: bytes, headers: dict[str, str], last: int | None) -> int | None:
        await self._ready()
        if last is not None:
            headers = {**headers, _EXPECTED: str(last)}
        try:
            reply = await self._stream.publish(
                subject, payload, timeout=self._timeout_s, stream=self._config.name, headers=headers or None
            )
        except APIError as error:
            if error.err_code == _WRONG_LAST:
                return None
            raise self._unavailable(error) from error
        except errors.Error as error:
            raise self._unavailable(error) from error
        return reply.seq

    async def last(self, subject: str) -> Logged | None:
        """See DurableLog."""
        await self._ready()
        try:
            found = await self._stream.get_msg(self._config.name, subject=subject, direct=True)
        except NotFoundError:
            return None
        except errors.Error as error:
            raise self._unavailable(error) from error
        return Logged(found.seq or 0, found.data or b"")

    async def following(self, subject: str, sequence: int) -> Logged | None:
        """See DurableLog."""
        await self._ready()
        try:
            found = await self._stream.get_msg(self._config.name, sequence, subject, direct=True, next=True)
        except NotFoundError:
            return None
        except errors.Error as error:
            raise self._unavailable(error) from error
        return Logged(found.seq or 0, found.data or b"")

    async def all_following(self, subject: str, sequence: int, most: int = 0) -> list[Logged]:
        """See DurableLog."""
        await self._ready()
        found: list[Logged] = []
        more = True
        while more and (not most or len(found) < most):
            wanted = min(BATCH_MESSAGES, most - len(found)) if most else BATCH_MESSAGES
            try:
                batch, more = await self._batch(subject, sequence, wanted)
            except errors.Error as error:
                raise self._unavailable(error) from error
            found += batch
            sequence = found[-1].sequence + 1 if found else sequence
        return found

    async def _batch(self, subject: str, sequence: int, count: int) -> tuple[list[Logged], bool]:
        """Returns the next messages, and whether there may be more. A server before 2.11 sends one at a time."""
        inbox = self._client.new_inbox()
        wanted = {"seq": sequence, "next_by_subj": subject, "batch": count, "max_bytes": _BATCH_BYTES}
        replies = await self._client.subscribe(inbox)  # pyright: ignore[reportUnknownMemberType]
        found: list[Logged] = []
        try:
            api_subject = f"$JS.API.DIRECT.GET.{self._config.name}"
            await self._client.publish(api_subject, json.dumps(wanted).encode(), reply=inbox)
            while True:
                with kept_cancellation():
                    reply = await replies.next_msg(timeout=self._timeout_s)
                headers = reply.headers or {}
                if status := headers.get("Status"):
                    if status not in (_END_OF_BATCH, _NOT_FOUND):
                        raise errors.Error(f"{status} {headers.get('Description', '')}".strip())
                    return found, bool(found) and int(headers.get(_PENDING, "0")) > 0
                found.append(Logged(int(headers["Nats-Sequence"]), reply.data))
                if _PENDING not in headers:
                    return found, True
        finally:
            await replies.unsubscribe()

    def _unavailable(self, error: Exception) -> LogUnavailableError:
        self._is_open = False
        return LogUnavailableError(f"the log {self._config.name} does not answer ({error or type(error).__name__})")


@contextlib.contextmanager
def kept_cancellation() -> Generator[None]:
    """Raises CancelledError at the end of the block if the task was cancelled within it but the block continued.

    nats-py waits with `asyncio.wait_for`. In Python 3.11 `wait_for` returns the result and drops the cancellation if
    the result and the cancellation arrive in the same iteration of the event loop. A task that works in a loop would
    then never end. (Fixed in Python 3.12.)
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    yield
    if task.cancelling() > before:
        raise asyncio.CancelledError
