"""What a process gives its service, and what a service is to its process.

`shared.actors.service.run_service` joins them; the simulation joins them on the in-process bus instead.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shared.actors.transport import Transport
from shared.clock import Clock
from shared.messages import EngineStatus, GatewayStatus, PoolStatus, ServiceName, StreamStatus
from shared.subjects import Subjects

Status = EngineStatus | StreamStatus | PoolStatus | GatewayStatus


@dataclass(frozen=True, slots=True)
class Host:
    """One incarnation's place in the world."""

    transport: Transport
    subjects: Subjects
    clock: Clock
    id: str
    instance_id: str


class Service(Protocol):
    """One of the four services. Made before the bus is reached, so that slow loading and connecting overlap."""

    name: ServiceName

    async def start(self, host: Host) -> None:
        """Loads what it needs and binds its subjects; when it returns the service can work."""
        ...

    def status(self) -> Status:
        """The load, for heartbeats. Cheap, and safe to call from another thread."""
        ...

    async def drain(self) -> None:
        """Finishes or hands over what it holds. The caller bounds the time."""
        ...

    async def run(self) -> None:
        """Works until `drain` has ended it. Raises when the service cannot go on: the process then exits with 13."""
        ...


@runtime_checkable
class SelfMonitoring(Protocol):
    """A service that can tell that its work stands still although the process lives."""

    def stalled(self) -> bool:
        """Whether it does now. Called before each heartbeat, on the thread that sends it; cheap."""
        ...
