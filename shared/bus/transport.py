"""The interface between actors and the message bus. Implemented by `nats`; tests also have an in-process bus.

Both implementations give the same guarantees, which one test suite checks: messages are delivered at most once;
messages from one publisher to one subscriber arrive in order while none is lost; after `barrier` returns, the bus knows
every subscription made before the call.
"""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from antiphon.shared.bus.durable_log import DurableLog, LogConfig
from antiphon.shared.bus.key_value import BucketConfig, KeyValueStore
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)
Headers = Mapping[str, str]
_num_refused = 0


class Delivery(msgspec.Struct, frozen=True):
    """One received message, not yet decoded. `reply` is the reply subject, empty if the sender expects no answer."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: Headers | None = None


class Traffic(NamedTuple):
    """Numbers of messages that a connection has received and sent since it was opened, and its subscriptions now."""

    received: int
    sent: int
    subscriptions: int


Receiver = Callable[[Delivery], None]
"""Called on the event loop for each received message; must not block."""


class NoRespondersError(Exception):
    """No process is subscribed to the subject of a request. This is the fastest sign that the peer has ended."""


class RequestTimeoutError(Exception):
    """No answer arrived within the time limit, although a process may be subscribed to the subject."""


class Subscription(Protocol):
    """A subscription to a subject."""

    async def unsubscribe(self) -> None:
        """Ends the subscription. Messages that were delivered before the call are still handled."""
        ...


class Transport(Protocol):
    """A connection to the bus."""

    @property
    def connected(self) -> bool:
        """Whether the bus can be reached. While it cannot, published messages go to a bounded buffer."""
        ...

    @property
    def losses(self) -> int:
        """How often the connection to the bus has been lost."""
        ...

    @property
    def traffic(self) -> Traffic:
        """The messages of this connection so far. May be read from any thread."""
        ...

    async def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """Sends a message one way, without a confirmation of its delivery. May wait for room in the outbound buffer.

        Raises ServiceError: 'bus_unavailable' when the outbound buffer is full, 'request_too_large' when payload and
        headers together exceed the size limit of the bus.
        """
        ...

    def send(self, subject: str, payload: bytes) -> None:
        """Like `publish`, but does not wait: if the outbound buffer is full, the message is refused at once."""
        ...

    async def subscribe(self, subject: str, receiver: Receiver, *, queue: str = "") -> Subscription:
        """Calls `receiver` for each message on `subject`, which may contain wildcards.

        With `queue`, each message goes to one member of that queue group only.
        """
        ...

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> Delivery:
        """Sends a request and returns the answer.

        Raises NoRespondersError, RequestTimeoutError, and the errors of `publish`.
        """
        ...

    async def barrier(self) -> None:
        """Returns when the bus has processed every subscription and message sent before the call."""
        ...

    def key_value_store(self, config: BucketConfig, *, timeout_s: float) -> KeyValueStore:
        """Returns a store. `timeout_s`: time limit of one operation."""
        ...

    def durable_log(self, config: LogConfig, *, timeout_s: float) -> DurableLog:
        """Returns a log of messages. `timeout_s`: time limit of one operation."""
        ...

    async def close(self) -> None:
        """Handles the delivered messages, sends the published ones, then closes the connection."""
        ...


def num_refused() -> int:
    """Returns the number of messages of this process that exceeded the size limit of the bus."""
    return _num_refused


def too_large(size: int, max_payload: int) -> ServiceError:
    """Returns the error for a message of `size` bytes on a bus with a limit of `max_payload` bytes.

    The error is also counted and logged.
    """
    global _num_refused
    _num_refused += 1
    log.warning("a message of %d bytes exceeds the bus limit of %d (%d so far)", size, max_payload, _num_refused)
    return ServiceError(
        "request_too_large",
        f"The request is too large for the message bus: {size} bytes, and the NATS server's max_payload is "
        f"{max_payload}. Make the prompt shorter, or raise max_payload in the server's configuration.",
    )
