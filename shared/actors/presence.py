"""Liveness by heartbeats: the table of known members (`Members`, pure), and the senders of a service's own heartbeats.

A member is one run of a service, named by its id and by its instance id, which is drawn at each process start. A member
counts as alive for one lease after its last heartbeat or other sign of life (`Members.heard`); a member with a longer
heartbeat interval has a longer lease. Correctness does not depend on leases: if a running member is considered dead,
its work is merely done twice.
"""

import asyncio
import concurrent.futures
import logging
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from antiphon.shared import codec, limits
from antiphon.shared.actors.host import Host, SelfReporting, Service
from antiphon.shared.bus.transport import Transport
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import Heartbeat, ServiceName, ServiceState

log = logging.getLogger(__name__)
REPLACED_INSTANCES_MAX = 16
"""Number of replaced instance ids remembered for each service id, so that their late heartbeats are ignored."""
EXPIRED_MAX = 1024
"""Number of service ids for which the latest expired instance is remembered (`Members.is_silent`)."""
THREAD_END_S = 5.0


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Member:
    """The latest heartbeat of a member, when it arrived, and when the member's lease ends. Monotonic seconds."""

    heartbeat: Heartbeat
    heard_at: float
    lives_until: float


@dataclass(frozen=True, slots=True)
class _Alive:
    """The living members of a service from `since` to `until`, unless its heartbeats change. Monotonic seconds."""

    members: tuple[Heartbeat, ...]
    since: float
    until: float


@dataclass(slots=True, kw_only=True)
class Members:
    """The members whose heartbeats were received. All times are seconds of one monotonic clock.

    While this process is disconnected from the bus, missing heartbeats do not show that a member is dead. Leases
    therefore do not run between `suspend` and `resume`, and `resume` gives each living member time to connect again.
    """

    lease_s: float = limits.LEASE_S
    _members: dict[tuple[str, str], _Member] = field(default_factory=dict[tuple[str, str], _Member])
    _replaced: dict[tuple[str, str], deque[str]] = field(default_factory=dict[tuple[str, str], deque[str]])
    _expired: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """The latest instance of each service id whose lease has run out, the oldest entry first."""
    _suspended_at: float | None = None
    _alive: dict[str, _Alive] = field(default_factory=dict[str, _Alive])
    """The last result of `alive` for each service; dropped when a member of the service or its lease changes."""

    def observe(self, heartbeat: Heartbeat, now: float) -> list[Heartbeat]:
        """Records a heartbeat. If it replaces another instance of the same service id, that instance is lost.

        Returns the last heartbeat of the replaced instance, or an empty list. Heartbeats of a replaced instance, and
        heartbeats older than the last recorded one, are ignored.
        """
        key = (heartbeat.service, heartbeat.id)
        known = self._members.get(key)
        if heartbeat.instance_id in self._replaced.get(key, ()):
            return []
        if known is not None and known.heartbeat.instance_id == heartbeat.instance_id:
            if heartbeat.sequence > known.heartbeat.sequence:
                known.heartbeat, known.heard_at = heartbeat, now
                known.lives_until = max(known.lives_until, now + self._lease_s(heartbeat))
                self._alive.pop(heartbeat.service, None)
            return []
        self._members[key] = _Member(heartbeat, now, now + self._lease_s(heartbeat))
        self._expired.pop(key, None)
        self._alive.pop(heartbeat.service, None)
        if known is None:
            return []
        self._replaced.setdefault(key, deque(maxlen=REPLACED_INSTANCES_MAX)).append(known.heartbeat.instance_id)
        return [known.heartbeat]

    def alive(self, service: str, now: float) -> tuple[Heartbeat, ...]:
        """Returns the latest heartbeat of each living member of a service, sorted by id; includes draining members.

        Returns the same object until a heartbeat of the service arrives or one of its members is lost.
        """
        known = self._alive.get(service)
        if known is None or not known.since <= now < known.until:
            known = self._alive[service] = self._find_alive(service, now)
        return known.members

    def _find_alive(self, service: str, now: float) -> _Alive:
        found = [m for (name, _), m in self._members.items() if name == service and self._lives(m, now)]
        until = math.inf
        if self._suspended_at is None:
            until = min((m.lives_until for m in found), default=math.inf)
        return _Alive(tuple(sorted((m.heartbeat for m in found), key=lambda beat: beat.id)), now, until)

    def ages(self, now: float) -> list[tuple[Heartbeat, float]]:
        """Returns each member's latest heartbeat and the seconds since it arrived, sorted by service and id.

        Also of members whose lease has run out and that `expire` has not removed.
        """
        found = [(m.heartbeat, now - m.heard_at) for m in self._members.values()]
        return sorted(found, key=lambda each: (each[0].service, each[0].id))

    def get(self, service: str, member_id: str) -> Heartbeat | None:
        """Returns the latest heartbeat of one member; None if the member is unknown or was removed."""
        member = self._members.get((service, member_id))
        return None if member is None else member.heartbeat

    def heard(self, service: str, member_id: str, instance_id: str, now: float) -> None:
        """Renews the lease of a living member that was heard without a heartbeat. Ignores other members.

        Only for STATUS_AGE_MAX_S after its last heartbeat.
        """
        member = self._members.get((service, member_id))
        if member is not None and member.heartbeat.instance_id == instance_id and self._lives(member, now):
            renewed_s = min(now + self._lease_s(member.heartbeat), member.heard_at + limits.STATUS_AGE_MAX_S)
            member.lives_until = max(member.lives_until, renewed_s)

    def expire(self, now: float) -> list[Heartbeat]:
        """Removes the members whose lease has run out, which are lost, and returns their last heartbeats."""
        return [heartbeat for heartbeat, _ in self.expire_silent(now)]

    def expire_silent(
        self, now: float, spares: Callable[[Heartbeat], bool] = lambda heartbeat: False
    ) -> list[tuple[Heartbeat, float]]:
        """Does the same, and returns the last heartbeats with the seconds since they arrived.

        A member that is spared is not alive, but stays: it lives again with its next heartbeat, and is lost if another
        instance replaces it or it is not spared at a later call. At most LONE_SILENCE_S after its last heartbeat.
        """
        overdue = [
            key
            for key, member in self._members.items()
            if not self._lives(member, now)
            and not (now - member.heard_at <= limits.LONE_SILENCE_S and spares(member.heartbeat))
        ]
        if overdue:
            self._alive.clear()
        gone = [self._members.pop(key) for key in overdue]
        lost = [(member.heartbeat, now - member.heard_at) for member in gone]
        for heartbeat, _ in lost:
            self._expired[heartbeat.service, heartbeat.id] = heartbeat.instance_id
        while len(self._expired) > EXPIRED_MAX:
            del self._expired[next(iter(self._expired))]
        return lost

    def overdue(self, now: float) -> list[tuple[Heartbeat, float]]:
        """Returns the members that `expire_silent` has spared, with the seconds since their last heartbeats."""
        return [(m.heartbeat, now - m.heard_at) for m in self._members.values() if not self._lives(m, now)]

    def is_silent(self, service: str, member_id: str, instance_id: str) -> bool:
        """Whether a member's lease has run out and it is not known whether its process has ended.

        It may be frozen or cut off from the bus. It is known to have ended when its successor sends a heartbeat.
        """
        return self._expired.get((service, member_id)) == instance_id

    def forget(self, service: str, member_id: str, instance_id: str) -> bool:
        """Removes a member that was found dead before its lease expired. Returns whether the member was known."""
        member = self._members.get((service, member_id))
        if member is None or member.heartbeat.instance_id != instance_id:
            return False
        del self._members[service, member_id]
        self._alive.pop(service, None)
        return True

    def suspend(self, now: float) -> None:
        """Records that this process lost its connection to the bus at `now`. Repeated calls have no effect."""
        if self._suspended_at is None:
            self._suspended_at = now
            self._alive.clear()

    def resume(self, now: float) -> None:
        """Records that this process is connected to the bus again. Repeated calls have no effect.

        No lease of a member that was alive at the time of `suspend` ends before RECONNECT_S from `now`.
        """
        if self._suspended_at is None:
            return
        for member in self._members.values():
            if self._lives(member, now):
                member.heard_at = now
                member.lives_until = now + max(limits.RECONNECT_S, self._lease_s(member.heartbeat))
        self._suspended_at = None
        self._alive.clear()

    def _lives(self, member: _Member, now: float) -> bool:
        at = now if self._suspended_at is None else self._suspended_at
        return at <= member.lives_until

    def _lease_s(self, heartbeat: Heartbeat) -> float:
        return max(self.lease_s, limits.LEASE_INTERVALS * heartbeat.interval_s)


def interval_of(service: ServiceName) -> float:
    """Returns the seconds between two heartbeats of a service."""
    others = {
        "gateway": limits.GATEWAY_HEARTBEAT_INTERVAL_S,
        "tokenizer": limits.TOKENIZER_HEARTBEAT_INTERVAL_S,
    }
    return others.get(service, limits.HEARTBEAT_INTERVAL_S)


async def sleep_to_beat(interval_s: float) -> None:
    """Sleeps for 0.5 to 1.5 intervals, until the event loop's clock is at a multiple of `interval_s`.

    All processes of a machine share this clock, so their periodic messages are sent at the same times, and a process
    that wakes once handles all messages of that time. With unaligned periods each message would wake it separately.
    """
    now = asyncio.get_running_loop().time()
    beats = math.floor(now / interval_s + 1.5)
    await asyncio.sleep(beats * interval_s - now)


# --- the senders ------------------------------------------------------------------------------------------------------


class HeartbeatTask:
    """Sends a service's heartbeats from the caller's event loop. For services that never block their loop for long.

    `transport` is the connection to send on; by default the host's.
    """

    def __init__(
        self,
        host: Host,
        service: Service,
        *,
        interval_s: float = limits.HEARTBEAT_INTERVAL_S,
        transport: Transport | None = None,
    ) -> None:
        self._host = host
        self._service = service
        self._interval_s = interval_s
        self._transport = transport or host.transport
        self._subject = host.subjects.heartbeat(service.name, host.id)
        self._reporting = service if isinstance(service, SelfReporting) else None
        self._state: ServiceState = "starting"
        self._sequence = 0
        self.unsent = 0
        """Number of heartbeats that could not be published. Heartbeats skipped while disconnected do not count."""
        self._task: asyncio.Task[None] | None = None

    def set_state(self, state: ServiceState) -> None:
        """Sets the state that the next heartbeats carry."""
        self._state = state

    async def run(self) -> None:
        """Sends heartbeats without end; sends the first one at once."""
        while True:
            await self._send()
            await sleep_to_beat(self._interval_s)

    async def start(self, state: ServiceState = "ready") -> None:
        """Starts `run` in a new task."""
        self._state = state
        self._task = asyncio.create_task(self.run(), name=f"heartbeats of {self._host.id}")

    async def announce(self, state: ServiceState) -> None:
        """Sets the state and sends a heartbeat at once."""
        self._state = state
        await self._send()

    async def failed(self) -> None:
        """Waits until the heartbeats end. Raises the exception that ended them; returns normally after `stop`."""
        assert self._task is not None
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def stop(self) -> None:
        """Ends the task and sends a last heartbeat with the state `draining`. Does nothing if no task is running."""
        if self._task is None or self._task.done():
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        await self.announce("draining")

    async def _send(self) -> None:
        if not self._transport.connected:
            return  # a heartbeat buffered until the reconnection would carry an outdated state
        try:
            await self._transport.publish(self._subject, codec.encode(self._next()))
        except ServiceError as error:
            self.unsent += 1
            log.warning("heartbeat %d of %s not sent: %s", self._sequence, self._host.id, error)

    def _present_state(self) -> ServiceState:
        return (self._reporting.reported_state() if self._reporting is not None else None) or self._state

    def _next(self) -> Heartbeat:
        self._sequence += 1
        traffic = self._host.transport.traffic
        return Heartbeat(
            service=self._service.name,
            id=self._host.id,
            instance_id=self._host.instance_id,
            protocol=limits.PROTOCOL_VERSION,
            state=self._present_state(),
            sequence=self._sequence,
            interval_s=self._interval_s,
            status=self._service.status(),
            messages_received=traffic.received,
            messages_sent=traffic.sent,
            num_subscriptions=traffic.subscriptions,
            resources=self._host.resources(),
        )


class Link(Transport, Protocol):
    """A bus connection that reports when it is permanently lost."""

    async def lost(self) -> None:
        """Returns when the connection is closed and will not be re-established."""
        ...


class HeartbeatThread:
    """Sends heartbeats from a separate thread, so that a service with a blocked main event loop does not seem dead.

    The thread has its own event loop and its own bus connection, made by `connect`. `Service.status` is called on this
    thread.
    """

    def __init__(
        self,
        host: Host,
        service: Service,
        connect: Callable[[], Awaitable[Link]],
        *,
        interval_s: float = limits.HEARTBEAT_INTERVAL_S,
    ) -> None:
        self._host = host
        self._service = service
        self._connect = connect
        self._interval_s = interval_s
        self._state: ServiceState = "starting"
        self._sender: HeartbeatTask | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._main, name=f"heartbeats of {host.id}", daemon=True)

    async def start(self, state: ServiceState = "ready") -> None:
        """Starts the thread and returns when it is connected. Raises the exceptions of `connect`."""
        self._state = state
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def announce(self, state: ServiceState) -> None:
        """Sets the state; the thread sends a heartbeat at once."""
        self._state = state
        self._tell_thread(self._announce)

    async def failed(self) -> None:
        """Waits until the heartbeats end. Raises the exception that ended them; returns normally after `stop`."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def stop(self) -> None:
        """Sends a last heartbeat with the state `draining`, closes the connection and ends the thread.

        Waits for at most `THREAD_END_S`, then logs a warning.
        """
        if not self._tell_thread(self._stopping.set):
            return
        ended = asyncio.wrap_future(self._ended)
        await asyncio.wait({ended}, timeout=THREAD_END_S)
        if not ended.done() or ended.exception() is not None:
            log.warning("the heartbeats of %s did not end in good order", self._host.id)

    def _tell_thread(self, order: Callable[[], object]) -> bool:
        if self._loop is None or self._ended.done():
            return False
        try:
            self._loop.call_soon_threadsafe(order)
        except RuntimeError:
            return False  # the thread's loop has closed between the check and the call
        return True

    def _announce(self) -> None:
        if self._sender is not None:
            self._announcing = asyncio.create_task(self._sender.announce(self._state))

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # re-raised to the caller of `start` or `failed`
            waiting = self._ended if self._started.done() else self._started
            waiting.set_exception(error)
        if not self._ended.done():
            self._ended.set_result(None)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        link = await self._connect()
        host, service = self._host, self._service
        sender = self._sender = HeartbeatTask(host, service, interval_s=self._interval_s, transport=link)
        try:
            await sender.start(self._state)
            self._started.set_result(None)
            await first_of(self._stopping.wait(), sender.failed(), link.lost())
            if not self._stopping.is_set():
                raise ServiceError("bus_unavailable", "The connection for heartbeats has ended.")
            await sender.stop()
        finally:
            await link.close()


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Runs coroutines until the first one ends, then cancels the others. Raises the exception of the one that ended."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
