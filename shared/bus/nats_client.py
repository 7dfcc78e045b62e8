"""The client of nats-py as `nats` uses it: a shorter way for messages in both directions, and clean reconnections.

The library passes each message through four tasks: the one that reads the socket, one for each subscription, that of
the actor, and the one that writes. Each costs a few µs for each token in each process. Here

- complete messages at the beginning of what the socket has received are delivered in the same callback (`_take`);
  everything else, such as PING, headers, and messages that are not complete, takes the library's way, and as long as it
  has something left, so do all messages behind it;
- messages of subscriptions with a receiver are never queued (`receivers`);
- what is published in one iteration of the event loop is written in the next one, by a callback (`_write`).

The library keeps the handshake, the subscriptions, the pings and the detection of lost connections. Only `nats` and
`nats_tcp` know this module.
"""

import asyncio
import functools
import secrets
import time
from collections.abc import Callable
from typing import Any

from nats import errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, NO_RESPONDERS_STATUS, Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header
from nats.protocol.parser import AWAITING_CONTROL_LINE

from antiphon.shared.bus.nats_tcp import BufferedTransport
from antiphon.shared.bus.own_bus import OwnBus

FLUSH_TIMEOUT_S = 2
ROUND_TRIP_ABANDONED_S = 30
"""Timeout that the library gets for a round trip, seconds. Longer than any connection lives without an answered ping,
so that the library never cancels a round trip on a live connection."""
CONGESTED_WAIT_S = 0.002
"""Seconds between two looks at a socket that does not take more data."""

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
        self._receivers: dict[bytes, Receive] = {}
        """By the id of the subscription, as the server writes it."""
        self._will_write = False
        self._trips: set[asyncio.Task[None]] = set()

    # --- sending ---

    def send(self, subject: str, reply: str, payload: bytes) -> None:
        """Sends a message without headers in the next iteration of the event loop, or after the next reconnection.

        Raises BadSubjectError, or ConnectionClosedError. The caller bounds `pending_data_size` and the payload.
        """
        if self.is_closed:
            raise errors.ConnectionClosedError
        command = b"%b%d\r\n%b\r\n" % (_publish_head(subject, reply), len(payload), payload)
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        self._pending.append(command)
        self._pending_data_size += len(command)
        self._write_soon()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        # The library would wake its writing task.
        if force_flush or not self.is_connected:
            return await super()._flush_pending(force_flush)
        self._write_soon()

    def _write_soon(self) -> None:
        if not self._will_write:
            self._will_write = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        """Writes what is pending. If the socket does not take more, it waits, and the pending commands are bounded."""
        self._will_write = False
        if not self.is_connected:
            return
        if isinstance(self._transport, BufferedTransport) and self._transport.is_congested:
            self._will_write = True
            asyncio.get_running_loop().call_later(CONGESTED_WAIT_S, self._write)
            return
        self._write_all()

    def _write_all(self) -> None:
        if self._pending_data_size > 0 and self._transport is not None:
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            self._transport.writelines(pending)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        # The library would write the PING ahead of pending commands, so that its PONG would not tell of them.
        if self.is_connected:
            self._write_all()
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
        self._receivers[b"%d" % subscription._id] = receive  # type: ignore[reportPrivateUsage]
        return subscription

    async def unsubscribe_from(self, subscription: Subscription) -> None:
        """Returns when the server has sent the subscription's last message. Raises Error if the connection is lost."""
        await subscription.drain()
        self._receivers.pop(b"%d" % subscription._id, None)  # type: ignore[reportPrivateUsage]

    async def _init_request_sub(self) -> None:
        await super()._init_request_sub()
        self._receivers[b"%d" % self._sid] = self._on_reply

    def _on_reply(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> None:
        replies: dict[str, asyncio.Future[Msg]] = self._resp_map  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        waiting = replies.pop(subject.rpartition(".")[2], None)
        if waiting is not None and not waiting.done():
            waiting.set_result(Msg(self, subject, reply, payload, headers))

    async def _read_loop(self) -> None:
        if isinstance(self._transport, BufferedTransport):
            self._transport.take_with(self._take)
        await super()._read_loop()

    def _take(self, received: memoryview, is_first: bool) -> int:
        """Delivers complete messages at the beginning of `received`. Returns the number of bytes that they took.

        `is_first`: nothing that was received before is waiting for the library.
        """
        parser = self._ps
        if not is_first or parser.buf or parser.state != AWAITING_CONTROL_LINE or self.is_closed:
            return 0
        data, at, count, size = bytes(received), 0, 0, 0
        while data.startswith(b"MSG ", at) and (end := data.find(b"\r\n", at)) > 0:
            words = data[at:end].split()
            if not 4 <= len(words) <= 5 or not words[-1].isdigit():
                break  # not a message, as the library will say
            if (receive := self._receivers.get(words[2])) is None:
                break
            begin = end + 2
            stop = begin + int(words[-1])
            if len(data) < stop + 2:
                break
            at, count, size = stop + 2, count + 1, size + stop - begin
            reply = words[3].decode(errors="replace") if len(words) == 5 else ""
            self._hand_over(receive, words[1].decode(errors="replace"), data[begin:stop], reply, None)
        self.stats["in_msgs"] += count
        self.stats["in_bytes"] += size
        return at

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        receive = self._receivers.get(b"%d" % sid)
        if receive is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        if headers and _STORED in headers and not self._observes and receive != self._on_reply:
            self._on_failure(StoredMessageError(f"a stored message on {subject.decode(errors='replace')} is dropped"))
            return
        found = await self._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]
        self._hand_over(receive, subject.decode(), data, reply.decode(), found)

    def _hand_over(
        self, receive: Receive, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None
    ) -> None:
        try:
            receive(subject, payload, reply, headers)
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
        if not self._resp_sub_prefix:
            await self._init_request_sub()
        assert self._resp_sub_prefix is not None
        replies: dict[str, asyncio.Future[Msg]] = self._resp_map  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        token, reply = _unguessable(), asyncio.get_running_loop().create_future()
        replies[token] = reply
        try:
            await self.publish(subject, payload, self._resp_sub_prefix.decode() + token, headers)
            async with asyncio.timeout(timeout):
                message = await reply
        except TimeoutError:
            raise errors.TimeoutError from None
        finally:
            replies.pop(token, None)
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


@functools.lru_cache(maxsize=256)  # few subjects get many messages; those of replies get one each
def _publish_head(subject: str, reply: str) -> bytes:
    """Returns the beginning of the command that publishes to a subject. Raises BadSubjectError."""
    if subject.split() != [subject] or (reply and reply.split() != [reply]):
        raise errors.BadSubjectError
    return f"PUB {subject} {reply} ".encode()
