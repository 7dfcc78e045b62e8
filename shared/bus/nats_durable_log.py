"""The log on a NATS server with JetStream. Made by `nats.NatsTransport`."""

import json

from nats import errors
from nats.aio.client import Client
from nats.js import api
from nats.js.errors import APIError, NotFoundError

from shared.bus.cancellation import kept_cancellation
from shared.bus.durable_log import BATCH_MESSAGES, LogConfig, Logged, LogUnavailableError

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_WRONG_LAST = 10071
"""The server's error code if the last sequence number of a subject is not the expected one."""
_BATCH_BYTES = 4 * 2**20
"""Approximate size after which the server ends a batch."""
_PENDING = "Nats-Num-Pending"
"""Header of servers that send batches: number of messages that follow."""
_END_OF_BATCH, _NOT_FOUND = "204", "404"
_COMPARED = (
    "subjects", "storage", "max_age", "max_bytes", "max_msgs_per_subject", "discard", "num_replicas",
    "duplicate_window", "allow_direct",
)  # fmt: skip
"""The fields of a stream's configuration that a log sets."""
_STORAGES = {"memory": api.StorageType.MEMORY, "file": api.StorageType.FILE}


class NatsDurableLog:
    """Implements `durable_log.DurableLog`. `replicas`: number of replicas of the log in a cluster."""

    def __init__(self, client: Client, config: LogConfig, timeout_s: float, replicas: int = 1) -> None:
        self._client = client
        self._stream = client.jetstream(timeout=timeout_s)  # pyright: ignore[reportUnknownMemberType]
        self._config, self._timeout_s, self._replicas = config, timeout_s, replicas

    async def open(self) -> None:
        """See DurableLog."""
        wanted = self._config
        config = api.StreamConfig(
            name=wanted.name,
            subjects=[wanted.subject],
            storage=_STORAGES[wanted.storage],
            max_age=wanted.max_age_s,
            max_bytes=wanted.max_bytes,
            max_msgs_per_subject=wanted.per_subject or -1,
            discard=api.DiscardPolicy.OLD,
            num_replicas=self._replicas,
            duplicate_window=min(wanted.max_age_s, 120.0),
            allow_direct=True,
        )
        try:
            found = await self._found()
            if found is None:
                try:
                    await self._stream.add_stream(config)  # pyright: ignore[reportUnknownMemberType]
                    return
                except APIError:
                    found = await self._found()
                    if found is None:
                        raise
            # The limits can be changed, but not the kind of storage. The number of replicas is never reduced.
            config.num_replicas = max(self._replicas, found.num_replicas or 1)
            if any(getattr(found, name) != getattr(config, name) for name in _COMPARED):
                await self._stream.update_stream(config)  # pyright: ignore[reportUnknownMemberType]
        except errors.Error as error:
            raise self._unavailable(error) from error

    async def _found(self) -> api.StreamConfig | None:
        """Returns the configuration of the log; None if there is none.

        The configuration is read first because the server checks the free storage before it checks whether the log
        exists: with too little storage left it would refuse to "create" an existing log.
        """
        try:
            return (await self._stream.stream_info(self._config.name)).config
        except NotFoundError:
            return None

    async def append(self, subject: str, payload: bytes, *, last: int | None = None) -> int | None:
        """See DurableLog."""
        headers = None if last is None else {_EXPECTED: str(last)}
        try:
            reply = await self._stream.publish(
                subject, payload, timeout=self._timeout_s, stream=self._config.name, headers=headers
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
        try:
            found = await self._stream.get_msg(self._config.name, subject=subject, direct=True)
        except NotFoundError:
            return None
        except errors.Error as error:
            raise self._unavailable(error) from error
        return Logged(found.seq or 0, found.data or b"")

    async def following(self, subject: str, sequence: int) -> Logged | None:
        """See DurableLog."""
        try:
            found = await self._stream.get_msg(self._config.name, sequence, subject, direct=True, next=True)
        except NotFoundError:
            return None
        except errors.Error as error:
            raise self._unavailable(error) from error
        return Logged(found.seq or 0, found.data or b"")

    async def all_following(self, subject: str, sequence: int) -> list[Logged]:
        """See DurableLog."""
        found: list[Logged] = []
        more = True
        while more:
            try:
                batch, more = await self._batch(subject, sequence)
            except errors.Error as error:
                raise self._unavailable(error) from error
            found += batch
            sequence = found[-1].sequence + 1 if found else sequence
        return found

    async def _batch(self, subject: str, sequence: int) -> tuple[list[Logged], bool]:
        """Returns the next messages, and whether there may be more. A server before 2.11 sends one at a time."""
        inbox = self._client.new_inbox()
        wanted = {"seq": sequence, "next_by_subj": subject, "batch": BATCH_MESSAGES, "max_bytes": _BATCH_BYTES}
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
        return LogUnavailableError(f"the log {self._config.name} does not answer ({error or type(error).__name__})")
