"""Tells the gateways that a process has ended, so that they need not wait for its missing heartbeats.

Also makes the launcher's connection to the bus, which other parts of the launcher use too.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

from antiphon.shared.actors.host import Host
from antiphon.shared.bus.credentials import server_urls
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.clock import SystemClock
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import MemberEnded
from antiphon.shared.messages.base import ServiceName
from antiphon.shared.subjects import Subjects, new_instance_id
from antiphon.supervision.fleet import Fleet
from antiphon.supervision.processes import ChildSpec

CONNECT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BusAddress:
    """The launcher's connection to the bus.

    `url`: URLs of the servers, separated by commas. `name`: the launcher's member id; on a bus that the launcher has
    started, this is also its user. `tls`: None without TLS.
    """

    url: str
    credentials: str
    name: str
    namespace: str
    tls: ssl.SSLContext | None = None


@contextlib.asynccontextmanager
async def announced_deaths(fleet: Fleet, where: BusAddress) -> AsyncIterator[Host]:
    """Connects the launcher to the bus, and announces each end of a child of the fleet until the end of the context.

    Raises ServiceError or SettingsError if the bus cannot be used.
    """
    subjects = Subjects(where.namespace)
    transport = await NatsTransport.connect(
        server_urls(where.url),
        name=where.name,
        inbox_prefix=subjects.inbox("launcher", where.name),
        credentials=where.credentials,
        tls=where.tls,
        wait_s=CONNECT_S,
    )
    host = Host(
        transport=transport, subjects=subjects, clock=SystemClock(), id=where.name, instance_id=new_instance_id()
    )
    notices = DeathNotices(host)
    fleet.on_end = notices.send
    try:
        yield host
    finally:
        await notices.cancel()
        await transport.close()


class DeathNotices:
    """Announces ends of processes on the bus."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._sending: set[asyncio.Task[None]] = set()

    def send(self, spec: ChildSpec) -> None:
        """Announces the end of a child's process, if the child is a member on the bus."""
        if spec.member_id:
            task = asyncio.create_task(self._send(MemberEnded(cast(ServiceName, spec.service), spec.member_id)))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def cancel(self) -> None:
        """Ends all sending."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _send(self, message: MemberEnded) -> None:
        # Without the bus no gateway can be informed; gateways notice missing heartbeats when the bus is back.
        with contextlib.suppress(ServiceError):
            await self._host.transport.publish(self._host.subjects.ended(), encode(message))
