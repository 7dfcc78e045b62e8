"""Which request the gateway begins to work on next, when many arrive at once: API keys take turns.

From its headers until its prompt waits for an engine, a request needs milliseconds of the gateway's one thread. Without
turns, a request that arrives after two hundred requests of another key would wait until the thread has worked on all of
them. In the same way, the queue for engines shares the engines' tokens between keys
(`services.gateway.path.placement`).

A turn ends when its request has been prepared, or after `TURN_S`, because a request may also wait for its body or for
another service, and needs no time of the thread meanwhile. The HTTP edge begins turns; a request that is prepared ends
its own (`Caller.prepared`).
"""

import asyncio
import time
from collections import OrderedDict, deque

from shared import limits


class Turn:
    """The turn of one request. `began_s`: when it began, monotonic seconds."""

    def __init__(self, turns: "Turns") -> None:
        self._turns: Turns | None = turns
        self.began_s = time.monotonic()
        self._ends_s = self.began_s + limits.TURN_S
        self._timer: asyncio.TimerHandle | None = None

    def limit(self) -> None:
        """Makes the turn end after `TURN_S`. Needed only while other requests wait for a turn."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._ends_s - time.monotonic(), self.end)

    def end(self) -> None:
        """Ends the turn. Does nothing if it has ended."""
        if (turns := self._turns) is not None:
            self._turns = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None  # breaks a reference cycle: the timer's context has the call, which has the turn
            turns.ended(self)


class Turns:
    """Gives up to `limits.TURNS_AT_ONCE` turns at a time: first the key that has waited longest since its last one."""

    def __init__(self) -> None:
        self._num_running = 0
        """Number of turns in progress, and of requests that have got a turn and have not yet noticed."""
        self._running: set[Turn] = set()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def begin(self, key: str) -> Turn:
        """Waits for a turn of this key. The caller must end it."""
        if self._num_running < limits.TURNS_AT_ONCE and not self._waiting:
            self._num_running += 1
            return self._begun()
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(mine)
        for turn in self._running:
            turn.limit()
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it has got its turn at the same moment
                self.ended(None)
            raise
        return self._begun()

    def _begun(self) -> Turn:
        turn = Turn(self)
        self._running.add(turn)
        if self._waiting:
            turn.limit()
        return turn

    def ended(self, turn: Turn | None) -> None:
        """Passes a turn that has ended on to the next request that still waits. None: a turn that did not begin."""
        if turn is not None:
            self._running.discard(turn)
        while self._waiting:
            key, waiting = self._waiting.popitem(last=False)
            first = waiting.popleft()
            if waiting:
                self._waiting[key] = waiting
            if not first.done():
                first.set_result(None)
                return
        self._num_running -= 1
