"""The seam to the bus: what an actor may ask of it. Implemented by `nats`; tests have a bus in one process.

Both promise the same, and one suite of tests holds them to it: at most once; in order from one publisher to one
subscriber while nothing is lost; after `barrier` returns, every subscription made before it is known to the bus.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as it came in. `reply` is empty when nobody waits for an answer."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: Headers | None = None


Receiver = Callable[[Delivery], None]
"""Called on the event loop for each message; must not block: decode, look up, put."""


class NoRespondersError(Exception):
    """Nobody listens on the subject: the fastest sign that a peer is gone."""


class RequestTimeoutError(Exception):
    """Somebody may listen, but no answer came in time."""


class Subscription(Protocol):
    """A standing interest in a subject."""

    async def unsubscribe(self) -> None:
        """Ends it; what was delivered before is still handled."""
        ...


class Transport(Protocol):
    """A connection to the bus."""

    @property
    def connected(self) -> bool:
        """False while the bus cannot be reached; publishing then only fills a bounded buffer."""
        ...

    async def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """Fire and forget.

        Raises ServiceError: 'bus_unavailable' when the outbound buffer is full, 'request_too_large' when the payload
        with its headers is larger than the bus takes.
        """
        ...

    async def subscribe(self, subject: str, receiver: Receiver, *, queue: str = "") -> Subscription:
        """Delivers every message on `subject` (wildcards allowed), or a share of them within a queue group."""
        ...

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> Delivery:
        """One question, one answer. Raises NoRespondersError or RequestTimeoutError, and what `publish` raises."""
        ...

    async def barrier(self) -> None:
        """Returns when the bus has seen every subscription and message sent before."""
        ...

    async def close(self) -> None:
        """Handles what was delivered, sends what was published, then leaves the bus."""
        ...
