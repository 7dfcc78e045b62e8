"""What an attack is: who makes it against which server, for how long and with which goal, and its function."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.attack.judging import Goal, Told
from tests.attack.place import Place

Make = Callable[[Place, random.Random], Told]
"""Makes the attack until the time of the place has ended, and says what it achieved. Runs in a process of its own."""
NO_KEY, ANY, BOB, PAGE = "no key", "any key", "a limited key", "a web page"
SERVICE, USER = "a service that was taken over", "another user of the machine"
OWN = ""
"""In place of a kind of server: the attack starts servers itself."""


DEFAULT = Goal()


class Skipped(Exception):
    """Why an attack cannot run here."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. `text`: the goal in words, where it is more than what `goal` has as numbers."""

    name: str
    what: str
    attacker: str
    make: Make
    text: str
    server: str = "keyed"
    seconds: float = 10.0
    goal: Goal = DEFAULT
    restart: bool = False
    """Whether the server is started again after the attack, with its files, and watched as long again."""
    kills: tuple[str, ...] = ()
    """Processes whose end is part of the attack, and so no miss."""
