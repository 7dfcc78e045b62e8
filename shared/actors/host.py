"""The interface between a process and its service: `Host` is passed to the service, `Service` is called by the process.

`shared.actors.service.run_service` runs a service as a process on NATS; the simulation runs services on the in-process
bus instead.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shared.bus.transport import Transport
from shared.clock import Clock
from shared.messages import EngineStatus, GatewayStatus, PoolStatus, ServiceName, StreamStatus, VisionStatus
from shared.subjects import Subjects

Status = EngineStatus | StreamStatus | PoolStatus | GatewayStatus | VisionStatus


@dataclass(frozen=True, slots=True)
class Host:
    """The environment of one run of a service: bus connection, subjects, clock, service id and instance id."""

    transport: Transport
    subjects: Subjects
    clock: Clock
    id: str
    instance_id: str


class Service(Protocol):
    """One of the four services. Constructed before the process connects to the bus."""

    name: ServiceName

    async def start(self, host: Host) -> None:
        """Loads the service's files and subscribes to its subjects. When `start` returns, the service is ready."""
        ...

    def status(self) -> Status:
        """Returns the load, for heartbeats. Cheap, and safe to call from another thread."""
        ...

    async def drain(self) -> None:
        """Finishes or hands over all work in progress. The caller limits the time."""
        ...

    async def run(self) -> None:
        """Runs until `drain` has ended the service.

        Raises an exception when the service cannot continue; the process then exits with 13.
        """
        ...


@runtime_checkable
class SelfTesting(Protocol):
    """A service that can detect that its own results are wrong."""

    @property
    def fault(self) -> str:
        """Description of the fault; empty: none.

        Read before each heartbeat, on the thread that sends it; must be cheap.
        """
        ...


@runtime_checkable
class SelfMonitoring(Protocol):
    """A service that can detect that its work makes no progress although its process is alive."""

    def stalled(self) -> bool:
        """Returns whether the work makes no progress now.

        Called before each heartbeat, on the thread that sends the heartbeat; must be cheap.
        """
        ...


@runtime_checkable
class Withdrawable(Protocol):
    """A service that an operator can drain while its process keeps running."""

    def withdrawn(self) -> bool:
        """Returns whether an operator drains the service; its heartbeats then say `draining`. Called like `stalled`."""
        ...
