"""A sequence and its copy on a second engine: text is held until the copy has the same tokens. Pure.

The text events of the sequence wait in order. An event is released when the copy has all of its tokens; its text is
then that of tokens on which both agree. The slower of the two therefore sets the pace.
"""

from collections import deque
from dataclasses import dataclass, field

from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared.messages import TextEvent


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which the two sequences differ, and both tokens; None: that sequence ended before it."""

    position: int
    tokens: tuple[int | None, int | None]


@dataclass(slots=True)
class Pair:
    """The held events of a sequence, and the tokens of its copy from position 0 on."""

    held: deque[tuple[TextEvent, Address]] = field(default_factory=deque[tuple[TextEvent, Address]])
    copied: list[int] = field(default_factory=list[int])
    copy_ended: bool = False
    num_compared: int = 0
    """Number of released tokens."""

    def restart(self, token_ids: list[int]) -> None:
        """Begins with a new copy, which continues `token_ids`."""
        self.copied, self.copy_ended = list(token_ids), False

    def add(self, position: int, token_ids: tuple[int, ...], *, ended: bool) -> bool:
        """Adds tokens of the copy.

        Returns False if earlier tokens are missing; the engine must then send them again.
        """
        overlap = len(self.copied) - position
        if overlap < 0:
            return False
        self.copied += token_ids[overlap:]
        self.copy_ended |= ended
        return True

    def release(self, attempt: int) -> tuple[list[tuple[TextEvent, Address]], Difference | None]:
        """Returns the events on which both agree, and the first difference if there is one.

        Drops events of other attempts.
        """
        released: list[tuple[TextEvent, Address]] = []
        while self.held:
            event, engine = self.held[0]
            if event.attempt == attempt:
                difference = self._difference(event)
                if difference is not None:
                    return released, difference
                if len(self.copied) < event.position + len(event.token_ids):
                    break
                released.append((event, engine))
                self.num_compared += len(event.token_ids)
            self.held.popleft()
        return released, None

    def release_all(self) -> list[tuple[TextEvent, Address]]:
        """Returns all held events. Called when there is no copy any more."""
        released = list(self.held)
        self.held.clear()
        return released

    def _difference(self, event: TextEvent) -> Difference | None:
        for position, token in enumerate(event.token_ids, event.position):
            if position >= len(self.copied):
                return Difference(position, (token, None)) if self.copy_ended else None
            if self.copied[position] != token:
                return Difference(position, (token, self.copied[position]))
        return None
