"""Faults that the in-process bus can apply to single messages: loss, duplication, delay. Used only by `memory`.

Random decisions come from the bus's seeded generator.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.shared.bus.transport import Delivery

Rule = float | Callable[[Delivery], bool]
"""Which messages a fault applies to: each with this probability, or those for which the predicate is true."""


@functools.lru_cache(maxsize=65536)
def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern, in which `*` stands for one token and `>` for one or more at the end."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


@dataclass(eq=False, slots=True)
class Fault:
    """A fault of a `MemoryBus`.

    `hits` counts the deliveries to which the fault was applied. A test must check that `hits` is not 0; otherwise the
    test may pass without any fault.
    """

    pattern: str
    rule: Rule = 1.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    sender: str = ""
    """Name of the connection whose sent messages are affected; empty: all connections."""
    target: str = ""
    """Name of the connection whose received messages are affected; empty: all connections."""
    hits: int = 0
    active: bool = True

    def remove(self) -> None:
        """Switches the fault off."""
        self.active = False

    def strikes(self, delivery: Delivery, sender: str, target: str, draw: random.Random) -> bool:
        """Whether the fault applies to this delivery. If so, adds one to `hits`."""
        if not self.active or self.sender not in ("", sender) or self.target not in ("", target):
            return False
        if not matches(self.pattern, delivery.subject):
            return False
        hit = draw.random() < self.rule if isinstance(self.rule, int | float) else self.rule(delivery)
        self.hits += hit
        return hit


@dataclass(slots=True)
class Faults:
    """The faults of one bus, and the random generator that decides about them."""

    draw: random.Random
    drops: list[Fault] = field(default_factory=list[Fault])
    duplicates: list[Fault] = field(default_factory=list[Fault])
    delays: list[Fault] = field(default_factory=list[Fault])

    def lost(self, delivery: Delivery, sender: str, target: str) -> bool:
        """Whether the message is lost."""
        return any(fault.strikes(delivery, sender, target, self.draw) for fault in self.drops)

    def doubled(self, delivery: Delivery, sender: str, target: str) -> bool:
        """Whether the message is delivered twice."""
        return any(fault.strikes(delivery, sender, target, self.draw) for fault in self.duplicates)

    def delay_s(self, delivery: Delivery, sender: str, target: str) -> float | None:
        """Returns the delay in seconds that a fault gives the message; None if no delay fault applies.

        If several apply, the fault that was added last decides.
        """
        for fault in reversed(self.delays):
            if fault.strikes(delivery, sender, target, self.draw):
                return self.draw.uniform(*fault.delay_s)
        return None
