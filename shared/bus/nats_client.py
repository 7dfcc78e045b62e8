"""The client of nats-py as `nats` uses it: messages without a queue, clean reconnections.

A message goes to the receiver of its subscription as soon as the library has read it (`receivers`): the library would
queue it, and drop it from a full queue. Everything else is the library's. Only `nats` and `nats_tcp` know this module.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from nats import errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, NO_RESPONDERS_STATUS, Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header

from shared.bus.nats_tcp import BufferedTransport
from shared.bus.own_bus import OwnBus

FLUSH_TIMEOUT_S = 2
ROUND_TRIP_ABANDONED_S = 30
"""Timeout that the library gets for a round trip, seconds. Longer than any connection lives without an answered ping,
so that the library never cancels a round trip on a live connection."""
_STORED = b"Nats-Stream: "
"""In the headers of a message that the server has read from a stream. Looked for in the bytes, because whoever has
stored the message chose the lines before it."""

Receive = Callable[[str, bytes, str, dict[str, str] | None], None]
"""Takes subject, payload, reply subject and headers of a message; must not block or wait."""


class StoredMessageError(errors.Error):
    """The server has sent a message from a stream to a subject on which nobody asked for it.

    Whoever reads a stream may name any subject for the answer, also one to which it may not publish itself.
    """


class NatsClient(Client):
    """See the module. `on_failure` is called with each exception of a receiver.

    `own`: the bus of this user's launcher, in place of the servers that `connect` is given; None: those servers.
    `observes`: see `NatsTransport.connect`.
    """

    def __init__(
        self, on_failure: Callable[[Exception], None], own: OwnBus | None = None, *, observes: bool = False
    ) -> None:
        super().__init__()
        self._on_failure, self._own, self._observes = on_failure, own, observes
        self._receivers: dict[int, Receive] = {}
        """By the id of the subscription."""
        self._replies: dict[str, asyncio.Future[Msg]] = {}
        self._own_inbox = ""
        """Begins the reply subjects of this client's requests; empty before the first one."""
        self._trips: set[asyncio.Task[None]] = set()

    # --- sending ---

    def send(self, subject: str, reply: str, payload: bytes) -> None:
        """Sends a message without headers, now or after the next reconnection. The caller bounds `pending_data_size`.

        Raises BadSubjectError, or ConnectionClosedError.
        """
        sending = self.publish(subject, payload, reply)
        try:
            sending.send(None)
        except StopIteration:
            return
        sending.close()  # the library waits only with more pending data than the caller allows
        raise errors.OutboundBufferLimitError

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        # The library would write the PING ahead of pending commands, so that its PONG would not tell of them.
        if self.is_connected and self._transport is not None and self._pending_data_size > 0:
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            self._transport.writelines(pending)
        await super()._send_ping(future)  # pyright: ignore[reportUnknownMemberType]

    # --- receiving ---

    @property
    def num_subscriptions(self) -> int:
        """Number of subscriptions of this connection, including those that nats-py makes for itself."""
        return len(self._subs)

    async def subscribe_to(self, subject: str, queue: str, receive: Receive) -> Subscription:
        """Subscribes with a receiver. Raises BadSubjectError."""

        async def queued(message: Msg) -> None:  # for a message that arrives before the next line
            receive(message.subject, message.data, message.reply, message.headers)

        subscription = await self.subscribe(subject, queue, queued)  # pyright: ignore[reportUnknownMemberType]
        self._receivers[subscription._id] = receive  # type: ignore[reportPrivateUsage]
        return subscription

    async def unsubscribe_from(self, subscription: Subscription) -> None:
        """Returns when the server has sent the subscription's last message. Raises Error if the connection is lost."""
        await subscription.drain()
        self._receivers.pop(subscription._id, None)  # type: ignore[reportPrivateUsage]

    def _on_reply(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> None:
        waiting = self._replies.pop(subject.rpartition(".")[2], None)
        if waiting is not None and not waiting.done():
            waiting.set_result(Msg(self, subject, reply, payload, headers))

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        receive = self._receivers.get(sid)
        if receive is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        to, answer = subject.decode(errors="replace"), reply.decode(errors="replace")
        if headers and _STORED in headers and not self._observes and receive != self._on_reply:
            self._on_failure(StoredMessageError(f"a stored message on {to} is dropped"))
            return
        found = await self._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]
        try:
            receive(to, data, answer, found)
        except Exception as error:
            self._on_failure(error)

    # --- requests ---

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """See the library. The library's stores and logs use this method too, and never ask for the old style.

        The reply is awaited here: the library's `asyncio.wait_for` takes one more callback for each reply, and may
        swallow a cancellation (`cancellation`). Its reply subjects follow from each other, so that whoever was asked
        once could reply to what others are asked later.
        """
        if not self._own_inbox:
            self._own_inbox = self.new_inbox()
            await self.subscribe_to(f"{self._own_inbox}.*", "", self._on_reply)
        token, reply = _unguessable(), asyncio.get_running_loop().create_future()
        self._replies[token] = reply
        try:
            await self.publish(subject, payload, f"{self._own_inbox}.{token}", headers)
            async with asyncio.timeout(timeout):
                message = await reply
        except TimeoutError:
            raise errors.TimeoutError from None
        finally:
            self._replies.pop(token, None)
        if message.headers and message.headers.get(Header.STATUS) == NO_RESPONDERS_STATUS:
            raise errors.NoRespondersError
        return message

    def new_inbox(self) -> str:
        """See the library. Nobody can guess the subject."""
        return f"{super().new_inbox()}.{_unguessable()}"

    # --- round trips ---

    async def flush(self, timeout: int = FLUSH_TIMEOUT_S) -> None:
        """Returns when the server has processed everything sent before. Raises FlushTimeoutError."""
        await self._round_trip(timeout)

    def abandon_round_trips(self) -> None:
        """Cancels all round trips. Only for a lost connection, on which no PONG will arrive any more."""
        for trip in tuple(self._trips):
            trip.cancel()

    async def _round_trip(self, timeout_s: float) -> None:
        trip = asyncio.create_task(super().flush(ROUND_TRIP_ABANDONED_S))
        self._trips.add(trip)
        trip.add_done_callback(self._trips.discard)
        await asyncio.wait({trip}, timeout=timeout_s)
        if not trip.done() or trip.cancelled():
            raise errors.FlushTimeoutError
        trip.result()

    # --- connecting ---

    def _connect_command(self) -> bytes:
        if self._own is not None:
            assert isinstance(self._transport, BufferedTransport)
            self._own.check(*self._transport.ends())
        # The library would send the password without TLS if the server, or an attacker in between, does not require
        # TLS.
        if "tls" in self.options and not self._server_info.get("tls_required"):
            raise errors.Error("nats: the server does not require TLS, which the settings ask for")
        return super()._connect_command()

    async def _connect_to_server(self, s: Srv) -> None:
        # The library begins a further attempt without ending an attempt that failed after its handshake, when the
        # subscriptions were sent. Both would then read from the new socket, which ends the reconnection for good.
        self._end_connection()
        if self._own is not None:
            s.uri = self._own.address()
        if s.uri.scheme in ("ws", "wss"):
            await super()._connect_to_server(s)
            return
        s.last_attempt = time.monotonic()
        self._transport = self._transport or BufferedTransport()
        await self._transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    async def _attempt_reconnect(self) -> None:
        # The library would wait until an unresponsive server has read what is written, which may take many minutes.
        self._end_connection()
        await super()._attempt_reconnect()

    def _end_connection(self) -> None:
        """Ends the tasks of the former connection, if there is one, and closes its socket at once."""
        self.abandon_round_trips()
        for name in ("_reading_task", "_ping_interval_task", "_flusher_task"):
            task: asyncio.Task[None] | None = getattr(self, name)
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        writer: asyncio.StreamWriter | None = getattr(self._transport, "_bare_io_writer", None)
        if writer is not None:
            writer.transport.abort()


def _unguessable() -> str:
    return secrets.token_hex(16)
