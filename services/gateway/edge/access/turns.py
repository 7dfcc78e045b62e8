"""Which request the gateway begins to work on next, when many arrive at once: API keys take turns.

From its headers until its prompt waits for an engine, a request needs milliseconds of the gateway's one thread. Without
turns, a request that arrives after two hundred requests of another key would wait until the thread has worked on all of
them. In the same way, the queue for engines shares the engines' tokens between keys
(`antiphon.services.gateway.path.placement`).

A turn ends when its request has been prepared, or after `TURN_S`, because a request may also wait for its body or for
another service, and needs no time of the thread meanwhile. The HTTP edge begins turns; a request that is prepared ends
its own (`Caller.prepared`).
"""

import asyncio
import time

from antiphon.shared import limits
from antiphon.shared.actors.fair_work import FairPlaces


class Turn:
    """The turn of one request. `began_s`: when it began, monotonic seconds."""

    def __init__(self, places: FairPlaces) -> None:
        self._places: FairPlaces | None = places
        self.began_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(limits.TURN_S, self.end)

    def end(self) -> None:
        """Ends the turn. Does nothing if it has ended."""
        if (places := self._places) is not None and self._timer is not None:
            self._timer.cancel()
            # The timer's context has the call, which has the turn: else that would be a reference cycle.
            self._places = self._timer = None
            places.give_back(1)


class Turns:
    """Gives up to `limits.TURNS_AT_ONCE` turns at a time, in turn to each key."""

    def __init__(self) -> None:
        self._places = FairPlaces(limits.TURNS_AT_ONCE)

    async def begin(self, key: str) -> Turn:
        """Waits for a turn of this key. The caller must end it."""
        if not self._places.take_free():
            await self._places.turn(key)
        return Turn(self._places)
