"""A connection to the in-process bus, its subscriptions and the messages in flight to it.

Connections are created by `memory.MemoryBus.connect`.
"""

import asyncio
import contextvars
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogConfig
from antiphon.shared.bus.key_value import BucketConfig
from antiphon.shared.bus.transport import (
    Delivery,
    Headers,
    NoRespondersError,
    Receiver,
    RequestTimeoutError,
    Traffic,
    too_large,
)
from antiphon.shared.errors import ServiceError
from tests.support.memory_durable_log import MemoryDurableLog
from tests.support.memory_key_value import Bucket, MemoryKeyValueStore

if TYPE_CHECKING:
    from tests.support.memory import MemoryBus

NO_RESPONDERS = {"Status": "503"}
"""Headers of the bus's answer to a request on a subject without subscribers."""


@dataclass(eq=False, slots=True)
class MemorySubscription:
    """See `transport.Subscription`."""

    owner: "MemoryTransport"
    pattern: str
    queue: str
    receiver: Receiver
    active_at: float
    open: bool = True
    pending: int = 0
    pending_bytes: int = 0
    last_due: dict[int, float] = field(default_factory=dict[int, float])
    """For each sender (by number): the time at which its latest message arrives."""
    emptied: asyncio.Event = field(default_factory=asyncio.Event)

    async def unsubscribe(self) -> None:
        """See `transport.Subscription`."""
        self.open = False
        while self.pending and self.owner.connected and not self.owner.frozen:
            self.emptied.clear()
            await self.emptied.wait()
        self.owner.forget(self)


@dataclass(order=True, slots=True)
class Flight:
    """A message in flight to one subscription. `due` is the time of its arrival."""

    due: float
    number: int
    sender: "MemoryTransport" = field(compare=False)
    target: MemorySubscription = field(compare=False)
    delivery: Delivery = field(compare=False)


class MemoryTransport:
    """A connection to a `MemoryBus` that implements `transport.Transport`. Made by `MemoryBus.connect`."""

    def __init__(self, bus: "MemoryBus", name: str, number: int, inbox_prefix: str) -> None:
        self.bus = bus
        self.name = name
        self.number = number
        self.context = contextvars.copy_context()
        """The context in which the connection was created, and in which receivers run.

        In a simulation the context identifies the simulated process.
        """
        self.counters: Counter[str] = Counter()
        self.deliveries: Counter[str] = Counter()
        self.on_error: Callable[[str, Exception], None] | None = None
        self.on_disconnect: Callable[[], None] | None = None
        self.on_reconnect: Callable[[], None] | None = None
        self._num_sent = 0
        self.crashed = False
        self.frozen = False
        self.held: deque[Flight] = deque()
        self._closed = False
        self.losses = 0
        self._linked = True
        self._link_up = asyncio.Event()
        self._link_up.set()
        self._lost = asyncio.Event()
        self._outbox: deque[Delivery] = deque()
        self._outbox_bytes = 0
        self._subscriptions: list[MemorySubscription] = []
        self._inbox = inbox_prefix
        self._asked = 0
        self._waiting: dict[str, asyncio.Future[Delivery]] = {}
        self._subscribe(f"{inbox_prefix}.*", self._answered, "", 0.0)

    @property
    def connected(self) -> bool:
        """See Transport."""
        return self._linked and not self.crashed and not self._closed

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def traffic(self) -> Traffic:
        """See Transport."""
        return Traffic(sum(self.deliveries.values()), self._num_sent, len(self._subscriptions))

    async def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """See Transport."""
        self._send(Delivery(subject, payload, reply, dict(headers) if headers else None))

    def send(self, subject: str, payload: bytes) -> None:
        """See Transport."""
        self._send(Delivery(subject, payload, "", None))

    async def subscribe(self, subject: str, receiver: Receiver, *, queue: str = "") -> MemorySubscription:
        """See Transport."""
        self._check_open()
        return self._subscribe(subject, receiver, queue, self._now() + self.bus.draw_delay_s())

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> Delivery:
        """See Transport."""
        self._asked += 1
        inbox = f"{self._inbox}.{self._asked}"
        answer = self._waiting[inbox] = asyncio.get_running_loop().create_future()
        try:
            self._send(Delivery(subject, payload, inbox, dict(headers) if headers else None))
            async with asyncio.timeout(timeout_s):
                delivery = await answer
        except TimeoutError:
            raise RequestTimeoutError(subject) from None
        finally:
            del self._waiting[inbox]
        if delivery.headers == NO_RESPONDERS:
            raise NoRespondersError(subject)
        return delivery

    async def barrier(self) -> None:
        """See Transport."""
        while True:
            self._check_open()
            await self._link_up.wait()
            wait_s = max((s.active_at for s in self._subscriptions), default=0.0) - self._now()
            if wait_s <= 0:
                return
            await asyncio.sleep(wait_s)

    def key_value_store(self, config: BucketConfig, *, timeout_s: float) -> MemoryKeyValueStore:
        """See Transport."""
        return MemoryKeyValueStore(self, self.bus.buckets.setdefault(config.name, Bucket()), config.ttl_s, timeout_s)

    def durable_log(self, config: LogConfig, *, timeout_s: float) -> MemoryDurableLog:
        """See Transport."""
        log = MemoryDurableLog(self, self.bus.logs.setdefault(config.name, []), config, timeout_s)
        self.bus.capturing.setdefault(config.name, log)
        return log

    async def make_store(self, config: LogConfig | BucketConfig, *, replicas: int, timeout_s: float) -> None:
        """See NatsTransport. On this bus every store exists."""

    async def close(self) -> None:
        """See Transport."""
        for subscription in tuple(self._subscriptions):
            await subscription.unsubscribe()
        self._closed = True
        self.end()
        self.bus.leave(self)

    async def lost(self) -> None:
        """Returns when the connection has been closed or its process has crashed."""
        await self._lost.wait()

    # --- faults, called by the bus ---

    def end(self) -> None:
        """Ends all subscriptions and drops held messages, as if the process had ended."""
        for subscription in self._subscriptions:
            subscription.open = False
            subscription.emptied.set()
            self.bus.forget(subscription)
        while self.held:
            self.bus.drop_held(self.held.popleft(), "lost_crash")
        self._link_up.set()
        self._lost.set()

    def thaw(self) -> None:
        """See `MemoryBus.thaw`."""
        self.frozen = False
        while self.held and not self.frozen:
            self.bus.deliver(self.held.popleft())
        self._flush()

    def disconnect(self) -> None:
        """See `MemoryBus.partition`."""
        self._linked = False
        self.losses += 1
        self._link_up.clear()
        while self.held:
            self.bus.drop_held(self.held.popleft(), "lost_partition")
        for subscription in self._subscriptions:
            subscription.emptied.set()
        if self.on_disconnect is not None:
            self.on_disconnect()

    def reconnect(self) -> None:
        """See `MemoryBus.heal`."""
        self._linked = True
        for subscription in self._subscriptions:
            subscription.active_at = self._now() + self.bus.draw_delay_s()
        self._link_up.set()
        self._flush()
        if self.on_reconnect is not None:
            self.on_reconnect()

    def forget(self, subscription: MemorySubscription) -> None:
        """Removes a subscription that has ended."""
        self.bus.forget(subscription)
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def report(self, kind: str, error: Exception) -> None:
        """Counts an error of this connection and passes it to `on_error`."""
        self.counters[kind] += 1
        if self.on_error is not None:
            self.on_error(kind, error)

    # --- helpers ---

    def _subscribe(self, subject: str, receiver: Receiver, queue: str, active_at: float) -> MemorySubscription:
        subscription = MemorySubscription(self, subject, queue, receiver, active_at)
        self._subscriptions.append(subscription)
        self.bus.add(subscription)
        return subscription

    def _send(self, delivery: Delivery) -> None:
        size = len(delivery.payload)
        self._num_sent += 1
        if not delivery.subject or any(c in " \t\r\n" for c in delivery.subject + delivery.reply):
            raise ServiceError("internal_error", "A subject of the bus is malformed.")
        if size > self.bus.max_payload:
            raise too_large(size, self.bus.max_payload)
        if self.crashed:
            self.bus.counters["lost_crash"] += 1
            return
        self._check_open()
        if self._linked and not self.frozen:
            self.bus.route(self, delivery)
            return
        if self._outbox_bytes + size > limits.OUTBOUND_BYTES_MAX:
            raise ServiceError("bus_unavailable", "The message bus cannot be reached.", retry_after_s=1.0)
        self._outbox.append(delivery)
        self._outbox_bytes += size
        self.bus.counters["held"] += 1

    def _flush(self) -> None:
        while self._outbox and self._linked and not self.frozen:
            delivery = self._outbox.popleft()
            self._outbox_bytes -= len(delivery.payload)
            self.bus.route(self, delivery)

    def _answered(self, delivery: Delivery) -> None:
        answer = self._waiting.get(delivery.subject)
        if answer is not None and not answer.done():
            answer.set_result(delivery)

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError("bus_unavailable", "The connection to the message bus is closed.", retry_after_s=1.0)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
