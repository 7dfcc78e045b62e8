"""Sends an engine's messages. Called by the actor, on the event loop.

A message that cannot be sent is counted, logged and dropped, like a message lost on the bus: its receiver asks again.
The tokens of such a message are not lost, because the sequence table keeps them.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from antiphon.services.engine.sequence_table import split
from antiphon.shared.actors.actor import tell_in_parts
from antiphon.shared.actors.host import Host
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import Message, SequenceSteps, StepEvent, StepEvents, TokenEvent, TokenEvents

log = logging.getLogger(__name__)
T = TypeVar("T")


class Publisher:
    """Sends the messages of the engine `host`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.unsent = 0
        """Number of messages that could not be sent."""

    def tokens(self, subject: str, step: int, events: Sequence[TokenEvent]) -> None:
        """Sends events to a detokenizer: the parts of prompts' log probabilities in messages of their own."""
        for event in events:
            if event.prompt_logprobs is not None:
                self._tokens(subject, step, (event,))
        others = tuple(event for event in events if event.prompt_logprobs is None)
        if others:
            self._tokens(subject, step, others)

    def _tokens(self, subject: str, step: int, events: tuple[TokenEvent, ...]) -> None:
        """Sends events as one message, or as several if one would be too large."""
        message = TokenEvents(self._host.id, self._host.instance_id, step, events)
        try:
            self._host.transport.send(subject, encode(message))
        except ServiceError as error:
            halves = split(events) if error.code == "request_too_large" else None
            if halves is None:
                self._count(subject, error)
                return
            for half in halves:
                self._tokens(subject, step, half)

    def steps(self, steps: Sequence[StepEvent], sequences: Sequence[SequenceSteps]) -> None:
        """Sends recorded steps, and what they did for recorded sequences."""
        if steps:
            make = functools.partial(_step_events, self._host.id, self._host.instance_id, tuple(steps))
            parts: list[tuple[SequenceSteps, ...]] = [(one,) for one in sequences] or [()]
            self.in_parts(self._host.subjects.steps(self._host.id), make, parts)

    def in_parts(self, subject: str, make: Callable[[Sequence[T]], Message], items: Sequence[T]) -> None:
        """Sends a message that lists items; see `tell_in_parts`."""
        try:
            tell_in_parts(self._host.transport, subject, make, items)
        except ServiceError as error:
            self._count(subject, error)

    def _count(self, subject: str, error: ServiceError) -> None:
        self.unsent += 1
        log.warning("engine %s could not send to %s: %s", self._host.id, subject, error)


def _step_events(
    engine_id: str, instance_id: str, steps: tuple[StepEvent, ...], parts: Sequence[tuple[SequenceSteps, ...]]
) -> StepEvents:
    return StepEvents(engine_id, instance_id, steps, tuple(itertools.chain.from_iterable(parts)))
