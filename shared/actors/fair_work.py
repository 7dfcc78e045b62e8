"""Work of a service that clients wait for: clients take turns, and none of them can fill the queue.

Used by tokenizers for long texts, by image services for images, and by gateways for bodies and the preparation of
requests. The service decides what a task is; this module says whether one more may wait (`FairRoom`, or `Shares` for
what takes memory), and which one is next (`FairPlaces`).
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

from antiphon.shared.errors import ServiceError
from antiphon.shared.security.api_keys import ANONYMOUS
from antiphon.shared.structures.fair_order import FairOrder

RETRY_AFTER_S = 1.0


class _Waiter:
    def __init__(self, places: int, cost: float) -> None:
        self.places, self.cost = places, cost
        self.turn = asyncio.get_running_loop().create_future()


class FairRoom:
    """How much work is in progress or waits, by client. `most`: of all clients together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: dict[str, int] = {}
        self.total = 0

    def take(self, client: str, amount: int) -> bool:
        """Adds work of a client if there is room for it. Returns whether it was added."""
        held, total = self._held.get(client, 0) + amount, self.total + amount
        if not self.has_room(client, held, total):
            return False
        self._held[client], self.total = held, total
        return True

    def has_room(self, client: str, held: int, total: int) -> bool:
        """Whether a client may have `held`, with which all clients together have `total`: as much as remains free.

        So a client that comes later always finds room. If there is no other work, there is room for any amount.
        """
        return not self.total or held <= self.most - total

    def give_back(self, client: str, amount: int) -> None:
        """Removes work that `take` has added."""
        self.total -= amount
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]


def leaves_room(key: str, held: int, total: int, most: int) -> bool:
    """Whether the key named `key` may have `held` of an amount of which all keys together then have `total`.

    `most`: the largest total. A key may have as much as remains free: one key alone has at most a half, of two busy
    keys each has at most a third, and a key that comes later always finds room. A server without keys has one client,
    which may have everything.
    """
    return total <= most and (key == ANONYMOUS.name or held <= most - total)


class Shares(FairRoom):
    """Amounts that are in use now, by API key, of which all keys together never have more than `most`."""

    def has_room(self, client: str, held: int, total: int) -> bool:
        """See `leaves_room`."""
        return leaves_room(client, held, total, self.most)


class FairPlaces:
    """Places for tasks that run at the same time, of which there are `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = self._free = capacity
        self._order = FairOrder()
        self._waiting: dict[str, deque[_Waiter]] = {}

    @contextlib.asynccontextmanager
    async def take(self, client: str, *, places: int = 1, cost: float = 1.0, wait_s: float) -> AsyncGenerator[None]:
        """Holds places for a task of a client, once it is the client's turn.

        A task that needs more than all places gets all of them. The next turn is that of the client whose tasks have
        had the smallest cost. Raises ServiceError after `wait_s` seconds without a turn.
        """
        places = min(places, self._capacity)
        try:
            async with asyncio.timeout(wait_s):
                await self.turn(client, places, cost)
        except TimeoutError:
            message = "The server has too much work of this kind. Try again later."
            raise ServiceError("server_is_overloaded", message, retry_after_s=RETRY_AFTER_S) from None
        try:
            yield
        finally:
            self.give_back(places)

    async def turn(self, client: str, places: int = 1, cost: float = 1.0) -> None:
        """Like `take`, but waits without limit, and the caller must give the places back."""
        waiter = _Waiter(places, cost)
        self._waiting.setdefault(client, deque()).append(waiter)
        self._order.activate(client)
        self._pass_on()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.cancelled():
                self._pass_on()  # others may have waited for it
            else:  # it has got its turn at the same moment
                self.give_back(places)
            raise

    def take_free(self) -> bool:
        """Takes a place if one is free and nobody waits; it does not count as a turn. Returns whether it was taken."""
        is_free = self._free > 0 and not self._waiting
        self._free -= is_free
        return is_free

    def give_back(self, places: int) -> None:
        """Gives back places that `turn` or `take_free` has given."""
        self._free += places
        if self._waiting:
            self._pass_on()

    def _pass_on(self) -> None:
        """Gives turns while there is room for the next task. Smaller ones behind it wait, so that it gets its room."""
        while (client := self._order.first()) is not None:
            queue = self._waiting[client]
            first = queue[0]
            if not first.turn.cancelled():
                if first.places > self._free:
                    return
                self._free -= first.places
                self._order.serve(client, first.cost)
                first.turn.set_result(None)
            queue.popleft()
            if not queue:
                del self._waiting[client]
                self._order.deactivate(client)
