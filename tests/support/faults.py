"""What can go wrong with one message of the in-process bus, decided by seed. Used by `memory` only."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.actors.transport import Delivery

Rule = float | Callable[[Delivery], bool]
"""When a fault strikes: with a probability, or when the predicate says so."""


@functools.lru_cache(maxsize=65536)
def matches(pattern: str, subject: str) -> bool:
    """True when a subject falls under a pattern with `*` (one token) and `>` (one or more at the end)."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


@dataclass(eq=False, slots=True)
class Fault:
    """A fault switched on by `MemoryBus`. `hits` says how often it struck: a test must look, or proves nothing."""

    pattern: str
    rule: Rule = 1.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    sender: str = ""
    """The connection whose messages it strikes; empty: every one."""
    target: str = ""
    """The connection that it keeps messages from; empty: every one."""
    hits: int = 0
    active: bool = True

    def remove(self) -> None:
        """Switches it off."""
        self.active = False

    def strikes(self, delivery: Delivery, sender: str, target: str, draw: random.Random) -> bool:
        """Decides about one delivery, and counts."""
        if not self.active or self.sender not in ("", sender) or self.target not in ("", target):
            return False
        if not matches(self.pattern, delivery.subject):
            return False
        hit = draw.random() < self.rule if isinstance(self.rule, int | float) else self.rule(delivery)
        self.hits += hit
        return hit


@dataclass(slots=True)
class Faults:
    """The faults of one bus and the generator that they draw from."""

    draw: random.Random
    drops: list[Fault] = field(default_factory=list[Fault])
    duplicates: list[Fault] = field(default_factory=list[Fault])
    delays: list[Fault] = field(default_factory=list[Fault])

    def lost(self, delivery: Delivery, sender: str, target: str) -> bool:
        """True when the message does not arrive."""
        return any(fault.strikes(delivery, sender, target, self.draw) for fault in self.drops)

    def doubled(self, delivery: Delivery, sender: str, target: str) -> bool:
        """True when the message arrives twice."""
        return any(fault.strikes(delivery, sender, target, self.draw) for fault in self.duplicates)

    def delay_s(self, delivery: Delivery, sender: str, target: str) -> float | None:
        """How long it takes, when a fault decides that: the one made last does."""
        for fault in reversed(self.delays):
            if fault.strikes(delivery, sender, target, self.draw):
                return self.draw.uniform(*fault.delay_s)
        return None
