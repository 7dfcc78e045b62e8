"""The interface between a process and its service: `Host` is passed to the service, `Service` is called by the process.

`antiphon.shared.actors.service.run_service` runs a service as a process on NATS; the simulation runs services on the
in-process bus instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from antiphon.shared.bus.transport import Transport
from antiphon.shared.clock import Clock
from antiphon.shared.messages import (
    EngineStatus,
    GatewayStatus,
    PoolStatus,
    ProcessResources,
    ServiceName,
    ServiceState,
    StreamStatus,
    VisionStatus,
)
from antiphon.shared.subjects import Subjects

Status = EngineStatus | StreamStatus | PoolStatus | GatewayStatus | VisionStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The environment of one run of a service: bus connection, subjects, clock, service id and instance id."""

    transport: Transport
    subjects: Subjects
    clock: Clock
    id: str
    instance_id: str
    resources: Callable[[], ProcessResources | None] = lambda: None
    """What the process uses of its machine; None: not known, as where several services share a process."""


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
class SelfReporting(Protocol):
    """A service that knows of its state what the process does not: wrong results, no progress, an operator's order."""

    def reported_state(self) -> ServiceState | None:
        """Returns the state for heartbeats in place of the one that was set; None: that one.

        Called before each heartbeat, on the thread that sends the heartbeat; must be cheap.
        """
        ...
