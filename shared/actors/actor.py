"""Actors: one bounded mailbox, one table of message type to handler, one failure rule.

An actor handles one message at a time, in the order of arrival, and shares its state with nobody. It is not a process:
a process hosts a few actors on one event loop (`Actor.bind` ties one to subjects of a transport).

The failure rule, for every actor of the system:

- A handler that raises `ServiceError` fails *that message*: a request is answered with `ErrorReply`; for a message that
  has no reply subject the failure is logged.
- Any other exception is the same with the code `internal_error`, and its traceback is logged.
- `AssertionError` is a broken invariant: the actor stops. The message at hand, the messages in the mailbox and later
  ones are answered with `actor_stopped`, `on_crash` runs, which must fail everything the actor holds, and `run` raises.
  The process of a service then exits with 13 and is started again by the launcher or the container runtime.
- A message that finds the mailbox full is refused: a request is answered with `server_is_overloaded`, anything else is
  counted and logged.
"""

import asyncio
import functools
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar

from shared import codec, limits
from shared.actors.transport import Delivery, Headers, NoRespondersError, RequestTimeoutError, Subscription, Transport
from shared.errors import ServiceError
from shared.messages import ErrorReply, Message

log = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Any, "Envelope"], Awaitable[Message | None] | Message | None]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded message with what came around it."""

    message: Message
    subject: str
    reply: str = ""
    headers: Headers | None = None


def handles(message_type: type[Message]) -> Callable[[Handler], Handler]:
    """Marks a method as the handler of one message type. What it returns is the reply."""

    def mark(method: Handler) -> Handler:
        method.__dict__["handled_type"] = message_type
        return method

    return mark


class Actor:
    """Subclass it, mark methods with `handles`, `bind` it to subjects, and `run` it."""

    handlers: ClassVar[dict[type[Message], Handler]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: dict[type[Message], Handler] = {
            f.handled_type: f for f in vars(cls).values() if hasattr(f, "handled_type")
        }
        cls.handlers = {**cls.handlers, **own}

    def __init__(self, name: str, transport: Transport, *, mailbox_max: int = limits.MAILBOX_MAX) -> None:
        self.name = name
        self.transport = transport
        self.overflowed = 0
        self.malformed = 0
        self._mailbox: deque[Envelope] = deque()
        self._mailbox_max = mailbox_max
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._ended = False
        self._current: Envelope | None = None
        self._subscriptions: list[Subscription] = []

    # --- life cycle ---

    async def on_stop(self) -> None:
        """Runs once after the last message of an orderly stop; never together with `on_crash`."""

    async def on_crash(self, error: BaseException) -> None:
        """Runs once when the actor dies: must fail everything it holds."""

    async def bind(self, subject: str, *types: type[Message], queue: str = "") -> None:
        """Receives messages of `types` on `subject`. Every type needs a handler."""
        assert all(t in self.handlers for t in types), (self.name, types)
        decoder = codec.Decoder(types)
        receive = functools.partial(self._receive, decoder)
        self._subscriptions.append(await self.transport.subscribe(subject, receive, queue=queue))

    async def run(self) -> None:
        """Handles messages until `stop`. Raises what killed the actor."""
        try:
            while (envelope := await self._next()) is not None:
                await self._handle(envelope)
        except BaseException as error:
            await self._crash(error)
            raise
        self._ended = True
        await self.on_stop()

    async def stop(self) -> None:
        """Leaves the subjects, lets `run` handle what has arrived, and lets it return."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()
        self._stopping = True
        self._wake.set()

    async def settle(self) -> None:
        """Returns when the mailbox is empty and no handler runs."""
        await self._idle.wait()

    # --- messages ---

    def put(self, envelope: Envelope) -> None:
        """Adds a message to the mailbox, or refuses it when the mailbox is full or the actor has ended."""
        if self._ended:
            self._refuse_ended(envelope)
            return
        if len(self._mailbox) >= self._mailbox_max:
            self.overflowed += 1
            refusal = ErrorReply("server_is_overloaded", f"{self.name} has too many messages waiting.", "", 1.0)
            if not self._reply_soon(envelope, refusal):
                self._log_overflow(envelope.message)
            return
        self._mailbox.append(envelope)
        self._idle.clear()
        self._wake.set()

    async def tell(self, subject: str, message: Message, headers: Headers | None = None) -> None:
        """Sends a message that nobody answers."""
        await self.transport.publish(subject, codec.encode(message), headers=headers)

    def _receive(self, decoder: codec.Decoder[Message], delivery: Delivery) -> None:
        try:
            message = decoder.decode(delivery.payload)
        except codec.DecodeError as error:
            self.malformed += 1
            log.warning("%s: malformed message on %s: %s", self.name, delivery.subject, error)
            refusal = ErrorReply("internal_error", "The message could not be read: do the services' versions differ?")
            self._reply_soon(Envelope(refusal, delivery.subject, delivery.reply), refusal)
            return
        self.put(Envelope(message, delivery.subject, delivery.reply, delivery.headers))

    async def _next(self) -> Envelope | None:
        while not self._mailbox:
            self._idle.set()
            if self._stopping:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._mailbox.popleft()

    async def _handle(self, envelope: Envelope) -> None:
        try:
            self._current = envelope
            result = self.handlers[type(envelope.message)](self, envelope)
            reply = await result if inspect.isawaitable(result) else result
            if reply is not None and envelope.reply:
                await self.transport.publish(envelope.reply, codec.encode(reply))
            self._current = None
        except AssertionError:
            raise
        except ServiceError as error:
            await self._fail(envelope, error)
        except Exception:
            log.exception("%s failed on %s", self.name, type(envelope.message).__name__)
            await self._fail(envelope, ServiceError("internal_error", "The request could not be processed."))

    async def _fail(self, envelope: Envelope, error: ServiceError) -> None:
        self._current = None
        if envelope.reply:
            try:
                await self.transport.publish(envelope.reply, codec.encode(error_reply(error)))
            except ServiceError as unsent:
                log.warning("%s could not tell of a failure (%s): %s", self.name, error.code, unsent)
        else:
            log.warning("%s: %s failed: %s", self.name, type(envelope.message).__name__, error.message)

    def _log_overflow(self, message: Message) -> None:
        # At 1, 2, 4, 8 … refusals: a flood of messages must not become a flood of log lines.
        if self.overflowed & (self.overflowed - 1) == 0:
            log.warning("%s: mailbox full, %s dropped (%d so far)", self.name, type(message).__name__, self.overflowed)

    async def _crash(self, error: BaseException) -> None:
        level = logging.INFO if isinstance(error, asyncio.CancelledError) else logging.CRITICAL
        log.log(level, "%s stopped: %r", self.name, error)
        self._ended = True
        waiting = [self._current, *self._mailbox]
        self._mailbox.clear()
        self._idle.set()
        for envelope in waiting:
            if envelope is not None:
                self._refuse_ended(envelope)
        for subscription in self._subscriptions:
            try:
                await subscription.unsubscribe()
            except ServiceError as stuck:
                log.warning("%s could not leave a subject: %s", self.name, stuck)
        await self.on_crash(error)

    def _refuse_ended(self, envelope: Envelope) -> None:
        self._reply_soon(envelope, ErrorReply("actor_stopped", f"{self.name} is restarting.", "", 1.0))

    def _reply_soon(self, envelope: Envelope, reply: ErrorReply) -> bool:
        if not envelope.reply:
            return False
        task = asyncio.create_task(self.transport.publish(envelope.reply, codec.encode(reply)))
        _PENDING_REPLIES.add(task)
        task.add_done_callback(_sent)
        return True


_PENDING_REPLIES: set[asyncio.Task[None]] = set()


def _sent(task: asyncio.Task[None]) -> None:
    _PENDING_REPLIES.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("a refusal could not be sent: %s", error)


def error_reply(error: ServiceError) -> ErrorReply:
    """The wire form of an expected failure."""
    return ErrorReply(error.code, error.message, error.param, error.retry_after_s)


def raise_error_reply(reply: ErrorReply) -> NoReturn:
    """The exception of a wire failure; an unknown code (a newer peer's) counts as internal."""
    from shared.errors import CODES

    code = reply.code if reply.code in CODES else "internal_error"
    raise ServiceError(code, reply.message, param=reply.param, retry_after_s=reply.retry_after_s)


async def tell_in_parts(
    transport: Transport, subject: str, make: Callable[[Sequence[T]], Message], items: Sequence[T]
) -> None:
    """Sends `make(items)`, halved as often as needed where the bus does not take it. Raises ServiceError.

    Sends nothing for no items.
    """
    if not items:
        return
    try:
        await transport.publish(subject, codec.encode(make(items)))
    except ServiceError as error:
        if error.code != "request_too_large" or len(items) == 1:
            raise
        half = len(items) // 2
        await tell_in_parts(transport, subject, make, items[:half])
        await tell_in_parts(transport, subject, make, items[half:])


async def ask(
    transport: Transport,
    subject: str,
    message: Message,
    expected: codec.Decoder[Message],
    *,
    timeout_s: float,
    headers: Headers | None = None,
) -> Message:
    """One request. Raises ServiceError for an error reply, NoRespondersError and RequestTimeoutError for silence.

    `expected` must include ErrorReply among its types.
    """
    data = codec.encode(message)
    return await ask_encoded(transport, subject, data, expected, timeout_s=timeout_s, headers=headers)


async def ask_encoded(
    transport: Transport,
    subject: str,
    data: bytes,
    expected: codec.Decoder[Message],
    *,
    timeout_s: float,
    headers: Headers | None = None,
) -> Message:
    """`ask` with a message that is encoded already."""
    delivery = await transport.request(subject, data, timeout_s=timeout_s, headers=headers)
    reply = expected.decode(delivery.payload)
    if isinstance(reply, ErrorReply):
        raise_error_reply(reply)
    return reply


__all__ = [
    "Actor",
    "Envelope",
    "NoRespondersError",
    "RequestTimeoutError",
    "ask",
    "ask_encoded",
    "error_reply",
    "handles",
    "raise_error_reply",
    "tell_in_parts",
]
