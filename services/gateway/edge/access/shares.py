"""How much of something bounded each API key may have, so that no key leaves the others nothing. Pure.

There are two cases. What is in use can only be refused: bodies in memory, unfinished batches, uploaded files. There a
key may have at most as much as stays free for others (`leaves_room`). What is kept only for convenience can be dropped:
finished responses, records of ended streams. There the key that has most loses its oldest first (`Kept`).
"""

from shared.security.api_keys import ANONYMOUS
from shared.structures.kept import Kept

__all__ = ["Kept", "Shares", "leaves_room"]


def leaves_room(key: str, held: int, total: int, most: int) -> bool:
    """Whether the key named `key` may have `held` of an amount of which all keys together then have `total`.

    `most`: the largest total. A key may have as much as remains free: one key alone has at most a half, of two busy
    keys each has at most a third, and a key that comes later always finds room. A server without keys has one client,
    which may have everything.
    """
    return total <= most and (key == ANONYMOUS.name or held <= most - total)


class Shares:
    """Amounts that are in use now, by key, of which all keys together have at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[str, int] = {}
        self.total = 0

    def take(self, key: str, amount: int) -> bool:
        """Takes an amount for a key, if `leaves_room` allows it. Returns whether it has been taken."""
        held, total = self._held.get(key, 0) + amount, self.total + amount
        if not leaves_room(key, held, total, self._most):
            return False
        self._held[key], self.total = held, total
        return True

    def give_back(self, key: str, amount: int) -> None:
        """Gives back an amount that `take` has taken."""
        self.total -= amount
        left = self._held[key] - amount
        if left:
            self._held[key] = left
        else:
            del self._held[key]
