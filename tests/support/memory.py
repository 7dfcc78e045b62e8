"""A bus within one process for tests and simulations: seeded, deterministic, with faults that a test can switch on.

The bus gives the guarantees of `antiphon.shared.bus.transport`, like a NATS server. The methods of `MemoryBus` add the
faults that occur with a real server. On a loop with virtual time (`simulation`) the same seed gives the same run.

Timing is as on a network. A message arrives `delay_s` after it was sent, but never before an earlier message from the
same connection to the same subscription (unless `reordering` is set). A subscription becomes effective `delay_s` after
it was made, so that tests find a missing `barrier`.
"""

import asyncio
import contextvars
import hashlib
import heapq
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable

from antiphon.shared import limits
from antiphon.shared.bus.transport import Delivery
from tests.support.faults import Fault, Faults, Rule, matches
from tests.support.memory_connection import NO_RESPONDERS, Flight, MemorySubscription, MemoryTransport
from tests.support.memory_durable_log import LogEntry, MemoryDurableLog
from tests.support.memory_key_value import Bucket

log = logging.getLogger(__name__)

PENDING_MAX, PENDING_BYTES_MAX = 65536, 64 * 2**20
"""Messages that wait for a subscription of a frozen client, and their bytes; further ones are lost."""


class MemoryBus:
    """An independent bus. `counters` has the number of deliveries and of each kind of fault.

    `delay_s` is the range (seconds) from which delays are drawn. `pending_max` limits the undelivered messages of a
    subscription; further ones are dropped as for a slow consumer.
    """

    def __init__(
        self, seed: int = 0, delay_s: tuple[float, float] = (0.0, 0.0), *, pending_max: int = PENDING_MAX
    ) -> None:
        self.delay_s = delay_s
        self.reordering = False
        """Whether messages may overtake each other."""
        self.max_payload = limits.BUS_PAYLOAD_BYTES
        """Largest message in bytes, like the setting of a server."""
        self.counters: Counter[str] = Counter()
        self.largest_payload = 0
        """Size in bytes of the largest message so far."""
        self.has_store = True
        """Whether key-value stores can be reached, like a server with JetStream."""
        self.buckets: dict[str, Bucket] = {}
        self.logs: dict[str, list[LogEntry]] = {}
        self.capturing: dict[str, MemoryDurableLog] = {}
        """For each log, what stores published messages in it."""
        self.observer: Callable[[str, Flight], None] | None = None
        """Called with the fate of each message (the name of a counter) and the message."""
        self._pending_max = pending_max
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._transports: dict[str, MemoryTransport] = {}
        self._subscriptions: list[MemorySubscription] = []
        self._interest: dict[str, list[MemorySubscription]] = {}
        """A cache of the subscriptions that match a subject. Cleared when subscriptions change."""
        self._faults = Faults(self._random)
        self._flights: list[Flight] = []
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0
        self._context = contextvars.copy_context()
        self._hash = hashlib.sha256()

    def connect(self, name: str, *, inbox_prefix: str = "") -> MemoryTransport:
        """Returns a new connection. Needs a running event loop.

        The name must not be in use; it is free again after `crash` or `close`.
        """
        assert name not in self._transports, name
        transport = MemoryTransport(self, name, next(self._numbers), inbox_prefix or f"_INBOX.{name}")
        self._transports[name] = transport
        return transport

    @property
    def fingerprint(self) -> str:
        """A hash over all deliveries so far and their times, which is equal for equal runs."""
        return self._hash.hexdigest()

    # --- faults ---

    def drop(self, pattern: str, rule: Rule = 1.0, *, sender: str = "", target: str = "") -> Fault:
        """Loses messages, independently for each receiver. Counted as `dropped`."""
        return self._add(self._faults.drops, Fault(pattern, rule, sender=sender, target=target))

    def duplicate(self, pattern: str, rule: Rule = 1.0, *, sender: str = "", target: str = "") -> Fault:
        """Delivers messages twice. Counted as `duplicated`."""
        return self._add(self._faults.duplicates, Fault(pattern, rule, sender=sender, target=target))

    def delay(self, pattern: str, low_s: float, high_s: float, *, sender: str = "", target: str = "") -> Fault:
        """Delays messages by `low_s` to `high_s` seconds; of several such faults the last decides.

        Counted as `delayed`.
        """
        return self._add(self._faults.delays, Fault(pattern, 1.0, (low_s, high_s), sender=sender, target=target))

    def crash(self, name: str) -> None:
        """Simulates the death of the process: its subscriptions end; its messages in flight and later ones are lost."""
        transport = self._transports.pop(name)
        transport.crashed = True
        transport.end()

    def freeze(self, name: str) -> None:
        """Simulates a stopped process whose connection stays open: messages to it and from it wait until `thaw`."""
        self._transports[name].frozen = True

    def thaw(self, name: str) -> None:
        """Resumes a frozen process and delivers the messages that have waited, in both directions."""
        self._transports[name].thaw()

    def partition(self, name: str) -> None:
        """Breaks the connection: messages to it are lost; messages from it wait in its outbound buffer until `heal`."""
        self._transports[name].disconnect()

    def heal(self, name: str) -> None:
        """Restores a broken connection with its subscriptions."""
        self._transports[name].reconnect()

    # --- used by transports ---

    def add(self, subscription: MemorySubscription) -> None:
        """Registers a subscription."""
        self._subscriptions.append(subscription)
        self._interest.clear()

    def forget(self, subscription: MemorySubscription) -> None:
        """Removes a subscription; does nothing if it is not registered."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._interest.clear()

    def leave(self, transport: MemoryTransport) -> None:
        """Removes a connection that was closed properly."""
        if self._transports.get(transport.name) is transport:
            del self._transports[transport.name]

    def draw_delay_s(self) -> float:
        """Draws the delay in seconds of one message through the bus."""
        return self._random.uniform(*self.delay_s)

    def route(self, sender: MemoryTransport, delivery: Delivery) -> None:
        """Sends a message to all matching subscriptions. If there are none, a request gets the answer NO_RESPONDERS."""
        for log in self.capturing.values() if self.has_store else ():
            if log.captures(delivery.subject):
                log.store(delivery.subject, delivery.payload)
        self.largest_payload = max(self.largest_payload, len(delivery.payload))
        targets = self._targets(delivery.subject)
        for target in targets:
            self._send(sender, target, delivery)
        if not targets and delivery.reply:
            absent = Delivery(delivery.reply, b"", headers=NO_RESPONDERS)
            for target in self._targets(delivery.reply):
                self._send(sender, target, absent)

    # --- implementation ---

    def _add(self, faults: list[Fault], fault: Fault) -> Fault:
        faults.append(fault)
        return fault

    def _targets(self, subject: str) -> list[MemorySubscription]:
        now = self._now()
        found: list[MemorySubscription] = []
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        for subscription in self._interested(subject):
            if not subscription.open or subscription.active_at > now:
                continue
            if not subscription.owner.connected:
                self.counters["lost_partition"] += 1
            elif subscription.queue:
                groups.setdefault((subscription.queue, subscription.pattern), []).append(subscription)
            else:
                found.append(subscription)
        return found + [self._random.choice(group) for group in groups.values()]

    def _interested(self, subject: str) -> list[MemorySubscription]:
        found = self._interest.get(subject)
        if found is None:
            found = [one for one in self._subscriptions if matches(one.pattern, subject)]
            self._interest[subject] = found
        return found

    def _send(self, sender: MemoryTransport, target: MemorySubscription, delivery: Delivery) -> None:
        names = sender.name, target.owner.name
        if self._faults.lost(delivery, *names):
            self.counters["dropped"] += 1
            self._observe("dropped", Flight(self._now(), 0, sender, target, delivery))
            return
        twice = self._faults.doubled(delivery, *names)
        self.counters["duplicated"] += twice
        for _ in range(1 + twice):
            self._launch(sender, target, delivery)

    def _launch(self, sender: MemoryTransport, target: MemorySubscription, delivery: Delivery) -> None:
        full = target.pending_bytes + len(delivery.payload) > PENDING_BYTES_MAX
        if full or target.pending >= self._pending_max:
            self.counters["slow_consumer"] += 1
            target.owner.report("slow_consumer", RuntimeError(f"{target.owner.name}: {target.pattern} is full"))
            return
        due = self._now() + self._delay_of(delivery, sender.name, target.owner.name)
        if not self.reordering:
            due = max(due, target.last_due.get(sender.number, 0.0))
        target.last_due[sender.number] = due
        target.pending += 1
        target.pending_bytes += len(delivery.payload)
        heapq.heappush(self._flights, Flight(due, next(self._numbers), sender, target, delivery))
        self._arm()

    def _delay_of(self, delivery: Delivery, sender: str, target: str) -> float:
        delay_s = self._faults.delay_s(delivery, sender, target)
        self.counters["delayed"] += delay_s is not None
        return self.draw_delay_s() if delay_s is None else delay_s

    def _arm(self) -> None:
        if not self._flights:
            return
        due = self._flights[0].due
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        loop, context = asyncio.get_running_loop(), self._context
        self._timer_due = due
        soon = due <= loop.time()
        self._timer = (
            loop.call_soon(self._land, context=context) if soon else loop.call_at(due, self._land, context=context)
        )

    def _land(self) -> None:
        self._timer = None
        now = self._now()
        while self._flights and self._flights[0].due <= max(now, self._timer_due):
            flight = heapq.heappop(self._flights)
            if flight.sender.crashed or flight.target.owner.crashed:
                self._drop_flight(flight, "lost_crash")
            elif not flight.target.owner.connected:
                self._drop_flight(flight, "lost_partition")
            elif flight.target.owner.frozen:
                self.counters["held"] += 1
                self._observe("held", flight)
                flight.target.owner.held.append(flight)
            else:
                self.deliver(flight)
        self._arm()

    def deliver(self, flight: Flight) -> None:
        """Calls the receiver of a message."""
        target, delivery = flight.target, flight.delivery
        self._landed(flight)
        self.counters["delivered"] += 1
        self._observe("delivered", flight)
        self._hash.update(f"{flight.due!r} {flight.sender.name} {target.owner.name} {delivery.subject}\n".encode())
        self._hash.update(delivery.payload)
        target.owner.deliveries[target.pattern] += 1
        try:
            target.owner.context.run(target.receiver, delivery)
        except Exception as error:  # as in a network client, an exception in a receiver must not stop the bus
            self.counters["receiver_failed"] += 1
            log.exception("%s: a receiver of %s failed", target.owner.name, target.pattern)
            target.owner.report("receiver_failed", error)

    def drop_held(self, flight: Flight, counter: str) -> None:
        """Drops a message that was held for a frozen receiver."""
        self._drop_flight(flight, counter)

    def _drop_flight(self, flight: Flight, counter: str) -> None:
        self.counters[counter] += 1
        self._observe(counter, flight)
        self._landed(flight)

    def _observe(self, what: str, flight: Flight) -> None:
        if self.observer is not None:
            self.observer(what, flight)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _landed(self, flight: Flight) -> None:
        target = flight.target
        target.pending -= 1
        target.pending_bytes -= len(flight.delivery.payload)
        if not target.pending:
            target.emptied.set()


__all__ = ["Fault", "MemoryBus", "MemoryTransport", "Rule", "matches"]
