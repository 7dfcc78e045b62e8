"""Actors: an actor has a bounded mailbox, a table from message type to handler, and the failure rules below.

An actor handles one message at a time, in the order of arrival, and shares its state with no other actor. An actor is
not a process: a process runs a few actors on one event loop. `Actor.bind` subscribes an actor to a subject.

A message that finds its actor idle, and whose handler is not a coroutine, is handled at once, in the callback in which
it was received. The task of the actor (`run`) handles all others; waking it for each message would cost about as much
as handling a token.

The failure rules, for every actor of the system:

- If a handler raises `ServiceError`, *that message* fails: a request is answered with `ErrorReply`; for a message
  without a reply subject the failure is logged.
- Any other exception is treated in the same way, with the code `internal_error`, and its traceback is logged.
- `AssertionError` means a broken invariant: the actor stops. The message in progress, the messages in the mailbox and
  later ones are answered with `actor_stopped`; `on_crash` runs, which must fail all requests that the actor holds; and
  `run` raises. The process of a service then exits with 13 and is restarted by the launcher or the container runtime.
- A message that arrives at a full mailbox is refused: a request is answered with `server_is_overloaded`, any other
  message is counted and logged.
"""

import asyncio
import functools
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from antiphon.shared import codec, limits
from antiphon.shared.bus.transport import Delivery, Headers, Subscription, Transport
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ErrorReply, Message
from antiphon.shared.observability.rare_logs import RareLog

log = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Envelope(msgspec.Struct, Generic[M], frozen=True):
    """A decoded message with its subject, reply subject and headers."""

    message: M
    subject: str
    reply: str = ""
    headers: Headers | None = None


Result = Awaitable[Message | None] | Message | None
Handler = Callable[[Any, Envelope[Any]], Result]
R = TypeVar("R", bound=Result)
Method = Callable[[Any, Envelope[M]], R]


def handles(message_type: type[M]) -> Callable[[Method[M, R]], Method[M, R]]:
    """Returns a decorator that makes a method the handler of one message type.

    The handler's return value is sent as the reply; for None nothing is sent.
    """

    def mark(method: Method[M, R]) -> Method[M, R]:
        method.__dict__["handled_type"] = message_type
        return method

    return mark


class Actor:
    """Base class of actors.

    A subclass marks its handlers with `handles`; the code that uses the actor calls `bind`, then `run`.
    """

    handlers: dict[type[Message], Handler] = {}  # noqa: RUF012 - an actor with `also_handles` has one of its own
    plain: frozenset[type[Message]] = frozenset()
    """The messages whose handlers are not coroutines."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: dict[type[Message], Handler] = {
            f.handled_type: f for f in vars(cls).values() if hasattr(f, "handled_type")
        }
        cls.handlers = {**cls.handlers, **own}
        cls.plain = frozenset(t for t, method in cls.handlers.items() if not inspect.iscoroutinefunction(method))

    def __init__(self, name: str, transport: Transport, *, mailbox_max: int = limits.MAILBOX_MAX) -> None:
        self.name = name
        self.transport = transport
        self.overflowed = 0
        self.malformed = 0
        self._rare = RareLog(log)
        self._mailbox: deque[Envelope[Any]] = deque()
        self._mailbox_max = mailbox_max
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._ended = False
        self._is_waiting = False
        """Whether `run` waits for a message."""
        self._broken: AssertionError | None = None
        """What a handler has raised outside of `run`, which ends with it."""
        self._current: Envelope[Any] | None = None
        self._subscriptions: list[Subscription] = []

    def also_handles(self, other: object) -> None:
        """Has `other` handle the messages for which it has methods marked with `handles`. Called before `bind`."""
        for name in dir(type(other)):
            method = inspect.getattr_static(type(other), name)
            if (kind := getattr(method, "handled_type", None)) is not None:
                bound = method.__get__(other)
                self.handlers = {**self.handlers, kind: lambda _, envelope, handle=bound: handle(envelope)}
                if not inspect.iscoroutinefunction(method):
                    self.plain |= {kind}

    # --- life cycle ---

    async def on_stop(self) -> None:
        """Called once after the last message of an orderly stop. Not called if `on_crash` was."""

    async def on_crash(self, error: BaseException) -> None:
        """Called once when the actor stops because of `error`. Must fail all requests that the actor holds."""

    async def bind(self, subject: str, *types: type[Message], queue: str = "") -> None:
        """Subscribes the actor to messages of `types` on `subject`. Every type needs a handler."""
        assert all(t in self.handlers for t in types), (self.name, types)
        decoder = codec.Decoder(types)
        receive = functools.partial(self._receive, decoder)
        self._subscriptions.append(await self.transport.subscribe(subject, receive, queue=queue))

    async def bind_handled(self, subject: str, *types: type[Message]) -> None:
        """Like `bind`, for those of the types that have a handler. Does nothing if none has."""
        if handled := [kind for kind in types if kind in self.handlers]:
            await self.bind(subject, *handled)

    async def run(self) -> None:
        """Handles messages until `stop`. Raises the exception that stopped the actor before that."""
        try:
            while (envelope := await self._next()) is not None:
                await self._handle(envelope)
        except BaseException as error:
            await self._crash(error)
            raise
        self._ended = True
        await self.on_stop()

    async def stop(self) -> None:
        """Ends the subscriptions and makes `run` return when all received messages are handled."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()
        self._stopping = True
        self._wake_up()

    async def settle(self) -> None:
        """Waits until the mailbox is empty and no handler is running."""
        await self._idle.wait()

    # --- messages ---

    def put(self, envelope: Envelope[Any]) -> None:
        """Adds a message to the mailbox. Refuses the message if the mailbox is full or the actor has ended."""
        if self._ended:
            self._refuse_ended(envelope)
            return
        if self._is_waiting and type(envelope.message) in self.plain:
            self._handle_now(envelope)
            return
        if len(self._mailbox) >= self._mailbox_max:
            self.overflowed += 1
            refusal = ErrorReply("server_is_overloaded", f"{self.name} has too many messages waiting.", "", 1.0)
            if envelope.reply:
                self._reply(envelope, refusal)
            else:
                self._log_overflow(envelope.message)
            return
        self._mailbox.append(envelope)
        self._idle.clear()
        self._wake_up()

    async def tell(self, subject: str, message: Message, headers: Headers | None = None) -> None:
        """Sends a message one way, without a reply subject."""
        await self.transport.publish(subject, codec.encode(message), headers=headers)

    def drop(self, subject: str, why: str) -> None:
        """Counts and logs a message that is wrong by itself, which is not handled further."""
        self.malformed += 1
        self._rare.warning("malformed", "%s: malformed message on %s: %s", self.name, subject, why)

    def _receive(self, decoder: codec.Decoder[Message], delivery: Delivery) -> None:
        try:
            message = decoder.decode(delivery.payload)
        except codec.DecodeError as error:
            self.drop(delivery.subject, str(error))
            refusal = ErrorReply("internal_error", "The message could not be read: do the services' versions differ?")
            if delivery.reply:
                self._reply(Envelope(refusal, delivery.subject, delivery.reply), refusal)
            return
        self.put(Envelope(message, delivery.subject, delivery.reply, delivery.headers))

    def _wake_up(self) -> None:
        self._is_waiting = False
        self._wake.set()

    async def _next(self) -> Envelope[Any] | None:
        while not self._mailbox:
            self._idle.set()
            if self._stopping:
                return None
            self._wake.clear()
            self._is_waiting = True
            await self._wake.wait()
            if self._broken is not None:
                raise self._broken
        return self._mailbox.popleft()

    def _handle_now(self, envelope: Envelope[Any]) -> None:
        """Handles a message outside of `run`, under the same rules. The handler may put others into the mailbox."""
        self._is_waiting, self._current = False, envelope
        try:
            reply = self.handlers[type(envelope.message)](self, envelope)
        except AssertionError as error:
            self._broken = error
            self._wake.set()
            return
        except Exception as error:
            reply = self._failure(envelope, error)
        self._current = None
        if reply is not None and envelope.reply:
            assert isinstance(reply, Message), (self.name, type(envelope.message))
            self._reply(envelope, reply)
        if not self._wake.is_set():
            self._is_waiting = True

    async def _handle(self, envelope: Envelope[Any]) -> None:
        self._current = envelope
        try:
            result = self.handlers[type(envelope.message)](self, envelope)
            reply = await result if inspect.isawaitable(result) else result
        except AssertionError:
            raise
        except Exception as error:
            reply = self._failure(envelope, error)
        if reply is not None and envelope.reply:
            self._reply(envelope, reply)
        self._current = None

    def _failure(self, envelope: Envelope[Any], error: Exception) -> ErrorReply:
        """Returns what the sender of a message is told about its failure. Logs what is not told to anybody."""
        name = type(envelope.message).__name__
        if not isinstance(error, ServiceError):
            self._rare.error(name, error, "%s failed on %s", self.name, name)
            error = ServiceError("internal_error", "The request could not be processed.")
        elif not envelope.reply:
            self._rare.warning(f"{name} refused", "%s: %s failed: %s", self.name, name, error.message)
        return error_reply(error)

    def _reply(self, envelope: Envelope[Any], reply: Message) -> None:
        """Sends a reply, or the reason why it cannot be sent."""
        try:
            self.transport.send(envelope.reply, codec.encode(reply))
        except Exception as error:
            if isinstance(reply, ErrorReply):
                told = "%s could not tell of a failure (%s): %s"
                self._rare.warning(f"untold {reply.code}", told, self.name, reply.code, error)
            else:
                self._reply(envelope, self._failure(envelope, error))

    def _log_overflow(self, message: Message) -> None:
        # Logged at the 1st, 2nd, 4th, 8th … refusal only, so that many refusals do not fill the log.
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

    def _refuse_ended(self, envelope: Envelope[Any]) -> None:
        if envelope.reply:
            self._reply(envelope, ErrorReply("actor_stopped", f"{self.name} is restarting.", "", 1.0))


def error_reply(error: ServiceError) -> ErrorReply:
    """Returns the message that reports an expected failure."""
    return ErrorReply(error.code, error.message, error.param, error.retry_after_s)


def raise_error_reply(reply: ErrorReply) -> NoReturn:
    """Raises the ServiceError that a reply describes. An unknown code (of a newer peer) becomes `internal_error`."""
    from antiphon.shared.errors import CODES

    code = reply.code if reply.code in CODES else "internal_error"
    raise ServiceError(code, reply.message, param=reply.param, retry_after_s=reply.retry_after_s)


def tell_in_parts(
    transport: Transport, subject: str, make: Callable[[Sequence[T]], Message], items: Sequence[T]
) -> None:
    """Sends `make(items)`. If the message is too large for the bus, sends each half of `items` separately, recursively.

    Sends nothing if `items` is empty. Raises ServiceError, also when a single item is too large.
    """
    if not items:
        return
    try:
        transport.send(subject, codec.encode(make(items)))
    except ServiceError as error:
        if error.code != "request_too_large" or len(items) == 1:
            raise
        half = len(items) // 2
        tell_in_parts(transport, subject, make, items[:half])
        tell_in_parts(transport, subject, make, items[half:])


async def ask(
    transport: Transport,
    subject: str,
    message: Message,
    expected: codec.Decoder[Message],
    *,
    timeout_s: float,
    headers: Headers | None = None,
) -> Message:
    """Sends a request and returns the decoded reply. `expected` must include ErrorReply among its types.

    Raises ServiceError for an error reply, NoRespondersError if nobody is subscribed to the subject, and
    RequestTimeoutError if no reply arrives within `timeout_s`.
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
    """Like `ask`, with a message that is already encoded."""
    delivery = await transport.request(subject, data, timeout_s=timeout_s, headers=headers)
    reply = expected.decode(delivery.payload)
    if isinstance(reply, ErrorReply):
        raise_error_reply(reply)
    return reply
