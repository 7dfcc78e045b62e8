"""Who is alive: the table of members that heartbeats fill (`Members`, pure), and the senders of one's own heartbeats.

A member is one run of a service: an id and an instance id. It counts as alive for one lease after its last heartbeat;
one that sends them more rarely has a longer lease.
Safety never depends on the lease; a wrong suspicion costs work done twice.
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

from shared import codec, limits
from shared.actors.host import Host, SelfMonitoring, Service
from shared.actors.transport import Transport
from shared.errors import ServiceError
from shared.messages import Heartbeat, ServiceName, ServiceState

log = logging.getLogger(__name__)
REPLACED_INSTANCES_MAX = 16
"""Former incarnations of one id whose late heartbeats are recognised."""
THREAD_END_S = 5.0


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Member:
    heartbeat: Heartbeat
    heard_at: float


@dataclass(slots=True)
class Members:
    """The members that were heard of. Times are monotonic seconds of one clock.

    While one's own link to the bus is down silence says nothing: between `suspend` and `resume` no lease runs, and each
    member then gets a whole one.
    """

    lease_s: float = limits.LEASE_S
    _members: dict[tuple[str, str], _Member] = field(default_factory=dict[tuple[str, str], _Member])
    _replaced: dict[tuple[str, str], deque[str]] = field(default_factory=dict[tuple[str, str], deque[str]])
    _suspended_at: float | None = None

    def observe(self, heartbeat: Heartbeat, now: float) -> list[Heartbeat]:
        """Takes in a heartbeat. Returns the last one of the incarnation that it replaces, if any: that one is lost.

        Late heartbeats, of a replaced incarnation or out of order, change nothing.
        """
        key = (heartbeat.service, heartbeat.id)
        known = self._members.get(key)
        if heartbeat.instance_id in self._replaced.get(key, ()):
            return []
        if known is not None and known.heartbeat.instance_id == heartbeat.instance_id:
            if heartbeat.sequence > known.heartbeat.sequence:
                known.heartbeat, known.heard_at = heartbeat, now
            return []
        self._members[key] = _Member(heartbeat, now)
        if known is None:
            return []
        self._replaced.setdefault(key, deque(maxlen=REPLACED_INSTANCES_MAX)).append(known.heartbeat.instance_id)
        return [known.heartbeat]

    def alive(self, service: str, now: float) -> list[Heartbeat]:
        """The latest heartbeat of each living member of a service, by id; draining members are among them."""
        found = [m.heartbeat for (name, _), m in self._members.items() if name == service and self._lives(m, now)]
        return sorted(found, key=lambda heartbeat: heartbeat.id)

    def get(self, service: str, member_id: str) -> Heartbeat | None:
        """The latest heartbeat of one member, until `expire` has reported it as lost."""
        member = self._members.get((service, member_id))
        return None if member is None else member.heartbeat

    def expire(self, now: float) -> list[Heartbeat]:
        """Forgets the members whose lease has run out and returns their last heartbeats: they are lost."""
        overdue = [key for key, member in self._members.items() if not self._lives(member, now)]
        return [self._members.pop(key).heartbeat for key in overdue]

    def forget(self, service: str, member_id: str, instance_id: str) -> bool:
        """Removes an incarnation that was found dead in another way. Returns whether it was known."""
        member = self._members.get((service, member_id))
        if member is None or member.heartbeat.instance_id != instance_id:
            return False
        del self._members[service, member_id]
        return True

    def suspend(self, now: float) -> None:
        """The own link to the bus is down since `now`. Harmless when repeated."""
        if self._suspended_at is None:
            self._suspended_at = now

    def resume(self, now: float) -> None:
        """The own link is up again: whoever lived when it broke has one lease to be heard. Harmless when repeated."""
        if self._suspended_at is None:
            return
        for member in self._members.values():
            if self._lives(member, now):
                member.heard_at = now
        self._suspended_at = None

    def _lives(self, member: _Member, now: float) -> bool:
        lease_s = max(self.lease_s, limits.LEASE_INTERVALS * member.heartbeat.interval_s)
        return (now if self._suspended_at is None else self._suspended_at) - member.heard_at <= lease_s


def interval_of(service: ServiceName) -> float:
    """Seconds between the heartbeats of a service."""
    others = {
        "gateway": limits.GATEWAY_HEARTBEAT_INTERVAL_S,
        "tokenizer": limits.TOKENIZER_HEARTBEAT_INTERVAL_S,
    }
    return others.get(service, limits.HEARTBEAT_INTERVAL_S)


async def sleep_to_beat(interval_s: float) -> None:
    """Sleeps until the loop's clock stands at a multiple of the interval, between half of it and one and a half away.

    The processes of a machine have that clock in common: what they do at the same beats wakes each of them once, where
    what each did at times of its own would wake it for every message of the others.
    """
    now = asyncio.get_running_loop().time()
    beats = math.floor(now / interval_s + 1.5)
    await asyncio.sleep(beats * interval_s - now)


# --- the senders ------------------------------------------------------------------------------------------------------


class HeartbeatTask:
    """Sends the heartbeats of a service from the caller's event loop. For services whose loop is never busy for long.

    They say `stalled`, whatever the state, while the service says so of itself (`SelfMonitoring`). `transport` is the
    connection to send on, the host's own unless given.
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
        self._monitor = service if isinstance(service, SelfMonitoring) else None
        self._state: ServiceState = "starting"
        self._sequence = 0
        self.unsent = 0
        """Heartbeats that could not be sent."""
        self._task: asyncio.Task[None] | None = None

    def set_state(self, state: ServiceState) -> None:
        """What the next heartbeats say."""
        self._state = state

    async def run(self) -> None:
        """Sends for ever, the first one at once."""
        while True:
            await self._send()
            await sleep_to_beat(self._interval_s)

    async def start(self, state: ServiceState = "ready") -> None:
        """Runs in a task of its own."""
        self._state = state
        self._task = asyncio.create_task(self.run(), name=f"heartbeats of {self._host.id}")

    async def announce(self, state: ServiceState) -> None:
        """Changes the state and says so at once."""
        self._state = state
        await self._send()

    async def failed(self) -> None:
        """Raises what ended the heartbeats; returns after `stop`."""
        assert self._task is not None
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def stop(self) -> None:
        """Sends a last heartbeat, `draining`, and no more."""
        if self._task is None or self._task.done():
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        await self.announce("draining")

    async def _send(self) -> None:
        if not self._transport.connected:
            return  # a heartbeat kept for later would tell of a past that is over
        try:
            await self._transport.publish(self._subject, codec.encode(self._next()))
        except ServiceError as error:
            self.unsent += 1
            log.warning("heartbeat %d of %s not sent: %s", self._sequence, self._host.id, error)

    def _next(self) -> Heartbeat:
        self._sequence += 1
        return Heartbeat(
            service=self._service.name,
            id=self._host.id,
            instance_id=self._host.instance_id,
            protocol=limits.PROTOCOL_VERSION,
            state="stalled" if self._monitor is not None and self._monitor.stalled() else self._state,
            sequence=self._sequence,
            interval_s=self._interval_s,
            status=self._service.status(),
        )


class Link(Transport, Protocol):
    """A connection that knows when it has ended for good."""

    async def lost(self) -> None:
        """Returns when no reconnection will be tried any more."""
        ...


class HeartbeatThread:
    """Sends heartbeats from a thread of its own, so that a long step on the main loop does not look like death.

    The thread has an event loop and a connection of its own, made by `connect`. `Service.status` is called on it.
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
        """Returns when the thread is connected. Raises what `connect` raises."""
        self._state = state
        self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def announce(self, state: ServiceState) -> None:
        """Changes the state; the thread says so at once."""
        self._state = state
        self._tell_thread(self._announce)

    async def failed(self) -> None:
        """Raises what ended the heartbeats; returns after `stop`."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def stop(self) -> None:
        """Sends a last heartbeat, `draining`, closes the connection and ends the thread."""
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
        except Exception as error:  # handed to whoever waits in `start` or `failed`
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
    """Returns when the first of them ends, or raises what it raised; cancels the others."""
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
