"""New requests that arrive while the gateway is disconnected from the bus: a few wait for a short time.

A gateway that has lost its NATS server is connected again, to another server or to the same one after a restart, within
tenths of a second. Without the wait, each request that arrives in that time would be refused.
"""

import asyncio

from antiphon.shared import limits
from antiphon.shared.actors.host import Host
from antiphon.shared.errors import ServiceError

POLL_S = 0.02
RETRY_AFTER_S = 1.0


class BusWait:
    """The requests of one gateway that wait for its connection. Their number and their time are bounded."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._num_waiting = 0

    def check(self) -> None:
        """Raises ServiceError('bus_unavailable') if the bus cannot be reached and no further request may wait."""
        if not self._host.transport.connected and self._num_waiting >= limits.BUS_WAITERS_MAX:
            raise _away()

    async def connected(self) -> None:
        """Returns when the bus can be reached. Raises ServiceError('bus_unavailable') after `limits.BUS_WAIT_S`."""
        self.check()
        self._num_waiting += 1
        try:
            deadline = self._host.clock.monotonic() + limits.BUS_WAIT_S
            while not self._host.transport.connected:
                if self._host.clock.monotonic() >= deadline:
                    raise _away()
                await asyncio.sleep(POLL_S)
        finally:
            self._num_waiting -= 1


def _away() -> ServiceError:
    message = "The bus cannot be reached. Try again shortly."
    return ServiceError("bus_unavailable", message, retry_after_s=RETRY_AFTER_S)
