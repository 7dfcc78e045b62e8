"""What a parser of model output returns: pieces of the answer, in order.

A piece continues the previous piece of its kind.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call. `call` numbers the calls of one output from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the call that began last: JSON text as the model wrote it."""

    call: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


def joined(events: Iterable[Event]) -> list[Event]:
    """Returns the events without empty ones; adjacent events of one kind are joined."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, CallStart):
            found.append(event)
        elif event.text:
            if last is not None and not isinstance(last, CallStart) and replace(last, text=event.text) == event:
                found[-1] = replace(last, text=last.text + event.text)
            else:
                found.append(event)
    return found
