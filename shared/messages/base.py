"""What every message is made of, and the two answers that any service gives. See the package."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
ServiceState = Literal["starting", "ready", "draining", "stalled"]
"""`stalled`: the process lives, but what it is for stands still. Whoever waits for it treats it as dead until it is
`ready` again."""
ServiceName = Literal["gateway", "tokenizer", "engine", "detokenizer"]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that can stand alone on the bus."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of what only occurs inside a message."""


class ErrorReply(Message, frozen=True, array_like=True, tag=True):
    """The answer to a request that failed. `code` is a key of `shared.errors.CODES`; `message` is for the user."""

    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


class Ack(Message, frozen=True, array_like=True, tag=True):
    """The answer to a command that was carried out and has nothing to return."""

    sequence_id: str


class SequenceRef(Part, frozen=True, array_like=True):
    """One sequence at one placement, for queries about many of them."""

    sequence_id: str
    attempt: int
