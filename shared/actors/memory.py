"""The bus within one process: seeded, deterministic, and full of faults on request. For tests and simulations.

It keeps the promises of `transport` as a NATS server does, and breaks them in the ways that one can: see the methods of
`MemoryBus` for the faults. On a loop with virtual time (`simulation`) the same seed gives the same run.

Time works as on a network: a message arrives `delay_s` after it was sent, never before an earlier one from the same
connection to the same subscription (unless `reordering`), and a subscription counts only `delay_s` after it was made,
so that a missing `barrier` shows.
"""

import asyncio
import hashlib
import heapq
import itertools
import logging
import random
from collections import Counter

from shared import limits
from shared.actors.faults import Fault, Faults, Rule, matches
from shared.actors.memory_connection import NO_RESPONDERS, Flight, MemorySubscription, MemoryTransport
from shared.actors.transport import Delivery

log = logging.getLogger(__name__)


class MemoryBus:
    """A bus of its own. `counters` counts deliveries and what the faults did to them."""

    def __init__(
        self, seed: int = 0, delay_s: tuple[float, float] = (0.0, 0.0), *, pending_max: int = limits.PENDING_MSGS_MAX
    ) -> None:
        self.delay_s = delay_s
        self.reordering = False
        """Switch it on to let messages overtake each other."""
        self.max_payload = limits.BUS_PAYLOAD_BYTES
        """Bytes of the largest message, as a server has it configured."""
        self.counters: Counter[str] = Counter()
        self._pending_max = pending_max
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._transports: dict[str, MemoryTransport] = {}
        self._subscriptions: list[MemorySubscription] = []
        self._faults = Faults(self._random)
        self._flights: list[Flight] = []
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0
        self._hash = hashlib.sha256()

    def connect(self, name: str, *, inbox_prefix: str = "") -> MemoryTransport:
        """A new connection. A name is free again after `crash` or `close`. Needs a running event loop."""
        assert name not in self._transports, name
        transport = MemoryTransport(self, name, next(self._numbers), inbox_prefix or f"_INBOX.{name}")
        self._transports[name] = transport
        return transport

    @property
    def fingerprint(self) -> str:
        """A hash over every delivery so far with its time: equal for equal runs."""
        return self._hash.hexdigest()

    # --- faults ---

    def drop(self, pattern: str, rule: Rule = 1.0) -> Fault:
        """Loses messages on the way to each receiver. Counted as `dropped`."""
        return self._add(self._faults.drops, Fault(pattern, rule))

    def duplicate(self, pattern: str, rule: Rule = 1.0) -> Fault:
        """Delivers messages twice. Counted as `duplicated`."""
        return self._add(self._faults.duplicates, Fault(pattern, rule))

    def delay(self, pattern: str, low_s: float, high_s: float) -> Fault:
        """Slows messages down; the fault made last decides. Counted as `delayed`."""
        return self._add(self._faults.delays, Fault(pattern, 1.0, (low_s, high_s)))

    def crash(self, name: str) -> None:
        """The process is gone: its subscriptions vanish, and what it has sent or sends still is lost."""
        transport = self._transports.pop(name)
        transport.crashed = True
        transport.end()

    def freeze(self, name: str) -> None:
        """The process stands still, unnoticed by the bus: messages to it and from it wait until `thaw`."""
        self._transports[name].frozen = True

    def thaw(self, name: str) -> None:
        """The process goes on with what has waited, in both directions."""
        self._transports[name].thaw()

    def partition(self, name: str) -> None:
        """The connection breaks: messages to it are lost, its own wait in its outbound buffer until `heal`."""
        self._transports[name].disconnect()

    def heal(self, name: str) -> None:
        """The connection is made anew, with the same subscriptions."""
        self._transports[name].reconnect()

    # --- used by transports ---

    def add(self, subscription: MemorySubscription) -> None:
        """Registers interest."""
        self._subscriptions.append(subscription)

    def forget(self, subscription: MemorySubscription) -> None:
        """Removes interest; harmless when there is none."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def leave(self, transport: MemoryTransport) -> None:
        """The connection has ended in good order."""
        if self._transports.get(transport.name) is transport:
            del self._transports[transport.name]

    def draw_delay_s(self) -> float:
        """How long one way through the bus takes now."""
        return self._random.uniform(*self.delay_s)

    def route(self, sender: MemoryTransport, delivery: Delivery) -> None:
        """Sends one message to all who want it; tells a waiting sender when nobody does."""
        targets = self._targets(delivery.subject)
        for target in targets:
            self._send(sender, target, delivery)
        if not targets and delivery.reply:
            absent = Delivery(delivery.reply, b"", headers=NO_RESPONDERS)
            for target in self._targets(delivery.reply):
                self._send(sender, target, absent)

    # --- inner workings ---

    def _add(self, faults: list[Fault], fault: Fault) -> Fault:
        faults.append(fault)
        return fault

    def _targets(self, subject: str) -> list[MemorySubscription]:
        now = asyncio.get_running_loop().time()
        found: list[MemorySubscription] = []
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        for subscription in self._subscriptions:
            if not subscription.open or subscription.active_at > now or not matches(subscription.pattern, subject):
                continue
            if not subscription.owner.connected:
                self.counters["lost_partition"] += 1
            elif subscription.queue:
                groups.setdefault((subscription.queue, subscription.pattern), []).append(subscription)
            else:
                found.append(subscription)
        return found + [self._random.choice(group) for group in groups.values()]

    def _send(self, sender: MemoryTransport, target: MemorySubscription, delivery: Delivery) -> None:
        if self._faults.lost(delivery):
            self.counters["dropped"] += 1
            return
        twice = self._faults.doubled(delivery)
        self.counters["duplicated"] += twice
        for _ in range(1 + twice):
            self._launch(sender, target, delivery)

    def _launch(self, sender: MemoryTransport, target: MemorySubscription, delivery: Delivery) -> None:
        full = target.pending_bytes + len(delivery.payload) > limits.PENDING_BYTES_MAX
        if full or target.pending >= self._pending_max:
            self.counters["slow_consumer"] += 1
            target.owner.report("slow_consumer", RuntimeError(f"{target.owner.name}: {target.pattern} is full"))
            return
        due = asyncio.get_running_loop().time() + self._delay_of(delivery)
        if not self.reordering:
            due = max(due, target.last_due.get(sender.number, 0.0))
        target.last_due[sender.number] = due
        target.pending += 1
        target.pending_bytes += len(delivery.payload)
        heapq.heappush(self._flights, Flight(due, next(self._numbers), sender, target, delivery))
        self._arm()

    def _delay_of(self, delivery: Delivery) -> float:
        delay_s = self._faults.delay_s(delivery)
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
        loop = asyncio.get_running_loop()
        self._timer_due = due
        self._timer = loop.call_soon(self._land) if due <= loop.time() else loop.call_at(due, self._land)

    def _land(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._flights and self._flights[0].due <= max(now, self._timer_due):
            flight = heapq.heappop(self._flights)
            if flight.sender.crashed or flight.target.owner.crashed:
                self._drop_flight(flight, "lost_crash")
            elif not flight.target.owner.connected:
                self._drop_flight(flight, "lost_partition")
            elif flight.target.owner.frozen:
                self.counters["held"] += 1
                flight.target.owner.held.append(flight)
            else:
                self.deliver(flight)
        self._arm()

    def deliver(self, flight: Flight) -> None:
        """Hands a message to its receiver."""
        target, delivery = flight.target, flight.delivery
        self._landed(flight)
        self.counters["delivered"] += 1
        self._hash.update(f"{flight.due!r} {flight.sender.name} {target.owner.name} {delivery.subject}\n".encode())
        self._hash.update(delivery.payload)
        target.owner.deliveries[target.pattern] += 1
        try:
            target.receiver(delivery)
        except Exception as error:  # as a network client would: a receiver's fault must not stop the bus
            self.counters["receiver_failed"] += 1
            log.exception("%s: a receiver of %s failed", target.owner.name, target.pattern)
            target.owner.report("receiver_failed", error)

    def drop_held(self, flight: Flight, counter: str) -> None:
        """Gives up on a message that waited for a frozen receiver."""
        self._drop_flight(flight, counter)

    def _drop_flight(self, flight: Flight, counter: str) -> None:
        self.counters[counter] += 1
        self._landed(flight)

    def _landed(self, flight: Flight) -> None:
        target = flight.target
        target.pending -= 1
        target.pending_bytes -= len(flight.delivery.payload)
        if not target.pending:
            target.emptied.set()


__all__ = ["Fault", "MemoryBus", "MemoryTransport", "Rule", "matches"]
