"""The bus over a NATS server. Only the files `nats` and `nats_…` import nats-py.

The library alone does not give the guarantees of `transport`. This module adds:

- A barrier. The library's `flush` writes its PING ahead of commands that wait in the client's buffer, so the PONG may
  arrive before the server has processed a SUB or PUB. `nats_client` writes the buffer first.
- Safe time limits. A PONG whose waiting future was cancelled ends the library's read loop. Round trips (PING and PONG)
  are therefore not cancelled while their connection lives: after a timeout the caller returns and the round trip
  continues in the background.
- One buffer to receive into (`nats_tcp`), without which the heap grows, and a shorter way for messages
  (`nats_client`).
- Reliable cancellation. A cancelled request ends even if its reply arrives at the same time.
- Clean reconnections. The library keeps the tasks and the socket of an attempt that failed late, and waits until a lost
  connection has written its data. `nats_client` ends the old tasks and the old socket before the next attempt.
- Size checks. If headers push a message over the server's limit, or a subject is too long, the server closes the
  connection permanently. Such messages are refused here.
- A time limit for the first connection, whose error states the reason. Later reconnections are retried without limit.

Messages are decoded in `actor`, not here.
"""

import asyncio
import logging
import random
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from nats import errors
from nats.aio.client import Server
from nats.aio.subscription import Subscription as ClientSubscription

from antiphon.shared import limits
from antiphon.shared.bus.credentials import read_credentials, without_credentials
from antiphon.shared.bus.durable_log import DurableLog, LogConfig
from antiphon.shared.bus.key_value import BucketConfig, KeyValueStore
from antiphon.shared.bus.nats_client import NatsClient, StoredMessageError
from antiphon.shared.bus.nats_durable_log import NatsDurableLog
from antiphon.shared.bus.nats_key_value import NatsKeyValueStore
from antiphon.shared.bus.nats_stores import StoreConfig, make_stream
from antiphon.shared.bus.own_bus import OwnBus, own_bus
from antiphon.shared.bus.transport import (
    Delivery,
    Headers,
    NoRespondersError,
    Receiver,
    RequestTimeoutError,
    Subscription,
    Traffic,
    too_large,
)
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1
PING_INTERVAL_S = 1
PINGS_OUTSTANDING_MAX = 2
"""Number of unanswered pings after which the connection to an unresponsive server is given up."""
TELL_S = 3.0
"""Seconds without a server after which the log says that there is none."""
RECONNECT_WAIT_S = (0.05, 0.2)
"""Bounds of the random wait before each reconnection, seconds. Random, so that clients do not all reconnect at once."""
BARRIER_TIMEOUT_S = 10.0
ROOM_WAIT_S = 0.5
"""How long `publish` waits for space in a full outbound buffer, seconds."""
CLOSE_TIMEOUT_S = 5.0
SUBJECT_CHARS_MAX = 1024
"""Well below the server's limit for a protocol line. The server closes the connection if a line exceeds that limit."""

_UNUSED = "nats://127.0.0.1"
"""Stands for the bus of this user's launcher, whose address is read for each connection."""

OnError = Callable[[str, Exception], None]
OnChange = Callable[[], None]


def _choose_server(servers: list[Server], _: dict[str, Any]) -> tuple[Server | None, float]:
    return random.choice(servers), random.uniform(*RECONNECT_WAIT_S)


_OPTIONS = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "ping_interval": PING_INTERVAL_S,
    "max_outstanding_pings": PINGS_OUTSTANDING_MAX,
    "max_reconnect_attempts": -1,
    "reconnect_to_server_handler": _choose_server,
    "reconnect_time_wait": RECONNECT_WAIT_S[0],
    "pending_size": limits.OUTBOUND_BYTES_MAX,
}
"""The client's options that are the same for every connection."""


class _Subscription:
    """See `transport.Subscription`."""

    def __init__(
        self, client: NatsClient, subscription: ClientSubscription, forget: Callable[["_Subscription"], None]
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._forget = forget
        self._ended = False

    async def unsubscribe(self) -> None:
        """See `transport.Subscription`."""
        if self._ended:
            return
        self._ended = True
        self._forget(self)
        try:
            await self._client.unsubscribe_from(self._subscription)
        except errors.Error as error:
            # The connection is lost or unresponsive: no more messages will be delivered, so draining is not needed.
            log.debug("unsubscribing from %s: %s", self._subscription.subject, error)


class NatsTransport:
    """A connection to a NATS server that implements `transport.Transport`. Made by `connect`.

    `counters` counts events by kind: `permission_denied`, `stored_message`, `receiver_failed`, `connection_error`,
    `disconnect`, `reconnect`. The first four kinds are also passed to `on_error`. The three callbacks run on the event
    loop and must not block. Messages are not queued here: a receiver gets each one as it arrives, and bounds what it
    keeps.
    """

    def __init__(self, name: str, own: OwnBus | None = None, *, observes: bool = False) -> None:
        self.name = name
        self._own, self._observes = own, observes
        self.counters: Counter[str] = Counter()
        self.deliveries: Counter[str] = Counter()
        """Number of received messages for each subscribed subject."""
        self.on_error: OnError | None = None
        self.on_disconnect: OnChange | None = None
        self.on_reconnect: OnChange | None = None
        self._client = NatsClient(self._failed, self._own, observes=self._observes)
        self._failure: asyncio.Future[Exception] | None = None
        self._subscriptions: list[_Subscription] = []
        self._losses = 0
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._closing = False

    @classmethod
    async def connect(
        cls,
        urls: Sequence[str],
        *,
        name: str,
        inbox_prefix: str,
        credentials: str = "",
        tls: ssl.SSLContext | None = None,
        observes: bool = False,
        wait_s: float = 30.0,
        on_error: OnError | None = None,
        on_disconnect: OnChange | None = None,
        on_reconnect: OnChange | None = None,
    ) -> "NatsTransport":
        """Connects to one of the servers; retries for up to `wait_s` seconds.

        A URL `file:` names the bus of this user's launcher (`own_bus`), and is the only one then.

        `credentials` is the path of a file with `user:password`. With `tls`, the connection uses TLS or fails.
        `observes`: subscriptions also get messages that the server has read from streams for others, which are not
        what they seem (`nats_client.StoredMessageError`).
        Raises ServiceError('bus_unavailable') naming the servers if none of them answers, and SettingsError if the
        credentials or certificates are refused or a URL is invalid.
        """
        transport = cls(name, own := own_bus([*urls]), observes=observes)
        transport.on_error, transport.on_disconnect, transport.on_reconnect = on_error, on_disconnect, on_reconnect
        user, password = read_credentials(credentials) if credentials else (None, None)
        options: dict[str, Any] = {
            **_OPTIONS,
            "servers": [_UNUSED] if own else [*urls],
            "name": name,
            "user": user,
            "password": password,
            "inbox_prefix": inbox_prefix,
            "error_cb": transport._on_error,
            "disconnected_cb": transport._on_disconnected,
            "reconnected_cb": transport._on_reconnected,
            "closed_cb": transport._on_closed,
        }
        if tls is not None:
            options["tls"] = tls
        await transport._open(options, ", ".join(without_credentials(url) for url in urls), wait_s)
        return transport

    # --- the Transport contract ---

    @property
    def connected(self) -> bool:
        """See Transport. An unresponsive server is detected after `PING_INTERVAL_S` × (`PINGS_OUTSTANDING_MAX` + 1)."""
        return self._client.is_connected

    @property
    def losses(self) -> int:
        """See Transport."""
        return self._losses

    @property
    def traffic(self) -> Traffic:
        """See Transport."""
        stats = self._client.stats
        return Traffic(stats["in_msgs"], stats["out_msgs"], self._client.num_subscriptions)

    async def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """See Transport. Does not wait for the server: the bytes are sent in the next iteration of the event loop."""
        _check(subject, payload, headers, self._client.max_payload)
        if not self._has_room(len(payload)):
            await self._make_room(len(payload))
        try:
            if headers is None:
                self._client.send(subject, reply, payload)
            else:
                await self._client.publish(subject, payload, reply, dict(headers))
        except errors.Error as error:
            raise _service_error(error) from error

    def send(self, subject: str, payload: bytes) -> None:
        """See Transport."""
        _check(subject, payload, None, self._client.max_payload)
        if not self._has_room(len(payload)):
            raise _service_error(errors.OutboundBufferLimitError())
        try:
            self._client.send(subject, "", payload)
        except errors.Error as error:
            raise _service_error(error) from error

    async def subscribe(self, subject: str, receiver: Receiver, *, queue: str = "") -> Subscription:
        """See Transport."""
        deliveries = self.deliveries

        def receive(to: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> None:
            deliveries[subject] += 1
            receiver(Delivery(to, payload, reply, headers))

        try:
            subscription = await self._client.subscribe_to(subject, queue, receive)
        except errors.Error as error:
            raise _service_error(error) from error
        self._subscriptions.append(_Subscription(self._client, subscription, self._subscriptions.remove))
        return self._subscriptions[-1]

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> Delivery:
        """See Transport. Also raises ServiceError, as `publish` does."""
        _check(subject, payload, headers, self._client.max_payload)
        try:
            message = await self._client.request(
                subject, payload, timeout=timeout_s, headers=None if headers is None else dict(headers)
            )
        except errors.NoRespondersError:
            raise NoRespondersError(subject) from None
        except errors.TimeoutError:
            raise RequestTimeoutError(subject) from None
        except errors.Error as error:
            raise _service_error(error) from error
        return Delivery(message.subject, message.data, message.reply, message.headers)

    async def barrier(self) -> None:
        """See Transport. If the connection is lost, waits for the reconnection and starts again.

        Raises ServiceError('bus_unavailable') after `BARRIER_TIMEOUT_S`, or if the connection is closed.
        """
        try:
            async with asyncio.timeout(BARRIER_TIMEOUT_S):
                while not await self._crossed():
                    if self._client.is_closed:
                        message = "The connection to the message bus is closed."
                        raise ServiceError("bus_unavailable", message, retry_after_s=1.0)
                    if not self._client.is_connected:
                        self._up.clear()
                    await self._up.wait()
        except TimeoutError:
            raise ServiceError("bus_unavailable", "The message bus does not answer.", retry_after_s=1.0) from None

    def key_value_store(self, config: BucketConfig, *, timeout_s: float) -> KeyValueStore:
        """See Transport. Needs a server with JetStream."""
        return NatsKeyValueStore(self._client, config.name, timeout_s)

    def durable_log(self, config: LogConfig, *, timeout_s: float) -> DurableLog:
        """See Transport. Needs a server with JetStream."""
        return NatsDurableLog(self._client, config, timeout_s)

    async def close(self) -> None:
        """See Transport. Waits at most `CLOSE_TIMEOUT_S` for the server, and as long again for the client to close."""
        if self._closing:
            return
        self._closing = True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for subscription in tuple(self._subscriptions):
                    await subscription.unsubscribe()
                if self._client.is_connected:
                    await self._client.flush()
        except (TimeoutError, errors.Error):
            log.warning("%s leaves a bus that does not answer", self.name)
        await _close_client(self._client)

    # --- beyond the contract ---

    async def make_store(self, config: StoreConfig, *, replicas: int, timeout_s: float) -> None:
        """Makes a log or store, or sets the limits of the one that exists. Only for the user that may do so.

        `replicas`: servers of a cluster that keep a copy; never reduced. Raises ServiceError('bus_unavailable').
        """
        context = self._client.jetstream(timeout=timeout_s)  # pyright: ignore[reportUnknownMemberType]
        try:
            await make_stream(context, config, replicas)
        except errors.Error as error:
            message = f"The store {config.name} cannot be made: {error or type(error).__name__}."
            raise ServiceError("bus_unavailable", message, retry_after_s=1.0) from error

    async def lost(self) -> None:
        """Returns when the connection is permanently closed without a call of `close`. The process should then end."""
        await self._lost.wait()

    # --- connecting ---

    async def _open(self, options: dict[str, Any], shown: str, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline, pause_s, told = loop.time() + wait_s, RECONNECT_WAIT_S[0], False
        while (error := await self._attempt(options)) is not None:
            if "authorization" in str(error).lower():
                raise SettingsError(f"nats-credentials: the NATS server at {shown} refuses them")
            if isinstance(error, ssl.SSLError) or "TLS" in str(error):
                raise SettingsError(f"nats-tls-ca, nats-tls-cert: no TLS with the NATS server at {shown}: {error}")
            if loop.time() + pause_s > deadline:
                message = f"No NATS server answers at {shown} ({error or type(error).__name__})."
                raise ServiceError("bus_unavailable", message, retry_after_s=1.0)
            if not told and (left_s := deadline - loop.time()) < wait_s - TELL_S:
                told = True
                log.warning("no NATS server answers at %s yet (%s); trying for %.0f s more", shown, error, left_s)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(1.0, pause_s * 2)
        self._failure = None
        self._up.set()

    async def _attempt(self, options: dict[str, Any]) -> Exception | None:
        """Makes one connection attempt with a new client. Returns the error, or None if the client is connected.

        The client by itself would retry without limit. Raises SettingsError for an invalid URL.
        """
        self._client = NatsClient(self._failed, self._own, observes=self._observes)
        self._failure = asyncio.get_running_loop().create_future()
        connecting = asyncio.create_task(self._client.connect(**options))
        waiting: list[asyncio.Future[Any]] = [connecting, self._failure]
        try:
            await asyncio.wait(waiting, timeout=3 * CONNECT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done() and (error := connecting.exception()) is not None:
                raise SettingsError(f"nats: {error}")
            if connecting.done():
                return None
            return self._failure.result() if self._failure.done() else errors.TimeoutError()
        finally:
            if not connecting.done():
                connecting.cancel()
                await asyncio.wait({connecting})
                await _close_client(self._client)

    # --- what the client reports ---

    async def _on_error(self, error: Exception) -> None:
        self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self._failure is not None:
            if not self._failure.done():
                self._failure.set_result(error)
            return
        kind = _kind(error)
        self.counters[kind] += 1
        count = self.counters[kind]
        if count & (count - 1) == 0:  # logs only the 1st, 2nd, 4th, 8th … error of a kind, to keep the log short
            trace = error if kind == "receiver_failed" else None
            log.warning("%s: %s (%d so far): %s", self.name, kind, count, error, exc_info=trace)
        if self.on_error is not None:
            self.on_error(kind, error)

    async def _on_disconnected(self) -> None:
        if self._failure is not None or self._closing:
            return
        self._losses += 1
        self._up.clear()
        self._client.abandon_round_trips()
        self.counters["disconnect"] += 1
        log.warning("%s: the bus is gone", self.name)
        if self.on_disconnect is not None:
            self.on_disconnect()

    async def _on_reconnected(self) -> None:
        self.counters["reconnect"] += 1
        self._up.set()
        log.info("%s: the bus is back", self.name)
        if self.on_reconnect is not None:
            self.on_reconnect()

    async def _on_closed(self) -> None:
        if not self._closing and self._failure is None:
            log.critical("%s: the bus has ended the connection: %s", self.name, self._client.last_error)
            self._lost.set()

    # --- helpers ---

    def _has_room(self, size: int) -> bool:
        return self._client.pending_data_size + size <= limits.OUTBOUND_BYTES_MAX

    async def _make_room(self, size: int) -> None:
        if self._client.is_connected:
            try:
                async with asyncio.timeout(ROOM_WAIT_S):
                    await self._client.flush()
            except (TimeoutError, errors.Error):
                log.debug("%s: the outbound buffer is not getting empty", self.name)
        if not self._has_room(size):
            raise _service_error(errors.OutboundBufferLimitError())

    async def _crossed(self) -> bool:
        losses = self._losses
        if not self._client.is_connected:
            return False
        try:
            await self._client.flush()
        except errors.Error:
            return False
        return self._client.is_connected and losses == self._losses


def _check(subject: str, payload: bytes, headers: Headers | None, max_payload: int) -> None:
    """Raises ServiceError for a message because of which the server would close the connection."""
    if len(subject) > SUBJECT_CHARS_MAX:
        raise ServiceError("internal_error", "A subject of the bus is too long.")
    size = len(payload)
    if headers is not None:
        size += sum(len(key) + 4 * len(value) for key, value in headers.items()) + 64
    if size > max_payload:
        raise too_large(size, max_payload)


async def _close_client(client: NatsClient) -> None:
    """Closes the client's socket in any state of the client. Waits for at most `CLOSE_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await client.close()
    except (TimeoutError, OSError, errors.Error) as error:
        log.debug("closing the connection: %r", error)
    client.abandon_round_trips()


def _kind(error: Exception) -> str:
    if isinstance(error, StoredMessageError):
        return "stored_message"
    if isinstance(error, errors.Error) and "permissions violation" in str(error):
        return "permission_denied"
    if isinstance(error, OSError | errors.Error | TimeoutError | EOFError):
        return "connection_error"
    return "receiver_failed"


def _service_error(error: errors.Error) -> ServiceError:
    if isinstance(error, errors.BadSubjectError | errors.BadHeaderError):
        return ServiceError("internal_error", "A subject or header of the bus is malformed.")
    return ServiceError("bus_unavailable", f"The message bus cannot be reached ({error}).", retry_after_s=1.0)
