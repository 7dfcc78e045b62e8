"""How much of something bounded each API key may have, so that no key leaves the others nothing. Pure.

There are two cases. What is in use can only be refused: bodies in memory, unfinished batches, uploaded files. There a
key may have at most as much as stays free for others (`leaves_room`). What is kept only for convenience can be dropped:
finished responses, records of ended streams. There the key that has most loses its oldest first (`Kept`).
"""

from shared.actors.fair_work import FairRoom
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


class Shares(FairRoom):
    """Amounts that are in use now, by key, of which all keys together have at most `most`."""

    def has_room(self, client: str, held: int, total: int) -> bool:
        """See FairRoom."""
        return leaves_room(client, held, total, self.most)
