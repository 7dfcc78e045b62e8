"""Base classes of messages, and the replies that every service uses. See the package."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
ServiceState = Literal["starting", "ready", "draining", "stalled", "faulty", "sleeping"]
"""`stalled`: the process is alive, but its work makes no progress (an engine whose step hangs). Gateways treat the
member as dead until its state is `ready` again. `faulty`: an engine's self-test has found wrong results, and the engine
ends; gateways treat it as dead too. `sleeping`: an engine sleeps, or falls asleep when its sequences have ended; its
model can still be used, because the engine can be woken.
"""
ServiceName = Literal["gateway", "tokenizer", "engine", "detokenizer", "vision"]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the types that are sent as a message of their own."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of the types that occur only inside a message."""


class ErrorReply(Message, frozen=True, array_like=True, tag=True):
    """The reply to a request that failed. `code` is one of `errors.CODES`; `message` is for the user."""

    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


class Ack(Message, frozen=True, array_like=True, tag=True):
    """The reply to a command that was carried out and has no result."""

    sequence_id: str


class SequenceRef(Part, frozen=True, array_like=True):
    """One sequence at one attempt, for queries about many sequences."""

    sequence_id: str
    attempt: int
