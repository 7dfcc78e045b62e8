"""The interface to a log of messages on the bus. For data that other processes need after its writer has died.

Implemented by `nats_durable_log` on JetStream. A log stores the messages of some subjects, in order, until they are too
old or the log is full; then the oldest are dropped. Messages have increasing sequence numbers, from 1.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Storage = Literal["memory", "file"]
BATCH_MESSAGES = 512
"""Maximum number of messages that are read with one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Configuration of a log. `subject`: the subject of the log's messages, with a wildcard.

    `per_subject`: maximum number of messages that are kept for one subject; 0: no maximum. `clears`: whether `clear`
    works although a subject has several messages. Then whoever may publish to any of the log's subjects can also clear
    all of them.
    """

    name: str
    subject: str
    storage: Storage
    max_age_s: float
    max_bytes: int
    per_subject: int = 0
    clears: bool = False


class Logged(NamedTuple):
    """A message of a log."""

    sequence: int
    payload: bytes


class LogUnavailableError(Exception):
    """The log did not answer in time: the bus is disconnected, has no JetStream, or denies access."""


class DurableLog(Protocol):
    """A log of messages. All methods raise LogUnavailableError."""

    async def open(self) -> None:
        """Returns when the log exists, which others make (`shared/deployment/store_keeper.py`). The rest waits too."""
        ...

    async def append(self, subject: str, payload: bytes, *, last: int | None = None) -> int | None:
        """Appends a message and returns its sequence number.

        With `last` the message is appended only if the last one of its subject has that sequence number (0: if there is
        none); otherwise returns None.
        """
        ...

    async def clear(self, subject: str, *, last: int | None = None) -> None:
        """Replaces the messages of a subject with an empty one, which is dropped after `LOG_EMPTY_S`.

        Only in a log with one message for each subject, or with `clears`. `last`: as for `append`; nothing happens if
        it is not the last one. Readers take an empty message for none. Permission to publish to the subject is enough.
        """
        ...

    async def last(self, subject: str) -> Logged | None:
        """Returns the last message of a subject; None if there is none."""
        ...

    async def following(self, subject: str, sequence: int) -> Logged | None:
        """Returns the first message of a subject, which may have wildcards, from this sequence number on; else None."""
        ...

    async def all_following(self, subject: str, sequence: int, most: int = 0) -> list[Logged]:
        """Returns the messages of a subject, which may have wildcards, from this sequence number on, in order.

        `most`: maximum number of messages; 0: all. One round trip returns about `BATCH_MESSAGES` messages.
        """
        ...
