"""Delivers the new output of all requests of a gateway once in each pass of the event loop.

So output that arrives together, in one message or in several, is written to a client together. Request actors call
`soon`; what a delivery does is theirs.
"""

import asyncio
from typing import Protocol


class Receiver(Protocol):
    """A request that has new output."""

    def deliver(self) -> None:
        """Passes the new output on. Must not raise."""
        ...


class Deliveries:
    """The requests of a gateway that have output to be delivered."""

    def __init__(self) -> None:
        self._due: list[Receiver] = []

    def soon(self, receiver: Receiver) -> None:
        """Schedules a delivery. The receiver calls this once for each delivery."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._due.append(receiver)

    def _deliver(self) -> None:
        due, self._due = self._due, []
        for receiver in due:
            receiver.deliver()
