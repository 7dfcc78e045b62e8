"""Positions in a stream: they tell which events a client has received, so that the server can continue after them.

Pure.

A position is the second part of an event's `id`: `<request id>:<position>`.

    o2            the first two events, which come before any output
    12.40         the events of the first 12 tokens and 40 characters of the only sequence
    12.40e,9.31   the same for two sequences, of which the first has ended
    12.40-0.14.47.2   in addition the first 2 events of the next output of sequence 0, up to token 14, character 47
    c1            all output, and the first event after it
    12.40@17      as 12.40, in a stream whose events have numbers: 17 events so far

Tokens and characters both count, because a token may give no text yet, and text may wait for later tokens.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from antiphon.shared.errors import ServiceError

_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_SHOWN = rf"{_NUMBER}\.{_NUMBER}e?"
_POSITION = re.compile(
    rf"(?:o(?P<opening>{_NUMBER})|c(?P<closing>{_NUMBER})|(?P<all>{_SHOWN}(?:,{_SHOWN})*)(?P<part>-[^@]+)?)"
    rf"(?:@(?P<number>{_NUMBER}))?"
)
_PART = re.compile(rf"-({_NUMBER})\.({_SHOWN})\.({_NUMBER})")


class Shown(NamedTuple):
    """How much of a sequence the client has received. `ended`: including its finish reason."""

    num_tokens: int = 0
    num_chars: int = 0
    ended: bool = False

    def text(self) -> str:
        """Returns its text form in a position."""
        return f"{self.num_tokens}.{self.num_chars}{'e' if self.ended else ''}"


@dataclass(frozen=True, slots=True)
class Part:
    """The first `num_events` events of those for the output of sequence `index` up to `until`."""

    index: int
    until: Shown
    num_events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position. `opening`, `closing`: number of received events before and after the output, if it is among those.

    `shown` has an entry for each sequence, unless the position is before or after the output. `number`: number of
    events up to here, if the stream's events have numbers.
    """

    shown: tuple[Shown, ...] = ()
    part: Part | None = None
    opening: int = 0
    closing: int = 0
    number: int | None = None

    @property
    def before_output(self) -> bool:
        """Whether the client has received no output."""
        return not self.shown and not self.closing


START = Position()


def parse(text: str, param: str) -> Position:
    """Returns a position. `0` is the beginning. Raises ServiceError('invalid_value') naming `param`."""
    if text in ("", "0"):
        return START
    found = _POSITION.fullmatch(text)
    if found is None:
        raise _invalid(text, param)
    number = int(found["number"]) if found["number"] else None
    if found["opening"]:
        return Position(opening=int(found["opening"]), number=number)
    if found["closing"]:
        return Position(closing=max(1, int(found["closing"])), number=number)
    shown = tuple(_shown(one) for one in found["all"].split(","))
    if not found["part"]:
        return Position(shown=shown, number=number)
    part = _PART.fullmatch(found["part"])
    if part is None or int(part[1]) >= len(shown):
        raise _invalid(text, param)
    return Position(shown=shown, part=Part(int(part[1]), _shown(part[2]), int(part[3])), number=number)


def _shown(text: str) -> Shown:
    tokens, _, chars = text.rstrip("e").partition(".")
    return Shown(int(tokens), int(chars), text.endswith("e"))


def _invalid(text: str, param: str) -> ServiceError:
    told = f"'{param}' has no position of a stream: {text[:40]!r}. Send what an event's id has behind the colon, or 0."
    return ServiceError("invalid_value", told, param=param)
