"""Supervision: a crashed actor or process is started anew, ever more slowly, until it has crashed too often.

`Backoff` is the policy and pure; the process launcher uses it too. `supervise` applies it to one actor. What the dead
actor held is failed by the actor itself (`Actor.on_crash`): nothing is carried over to its successor.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shared.actors.actor import Actor
from shared.clock import Clock, SystemClock

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Backoff:
    """How long to wait after a crash, and when to give up.

    The wait starts at `first_s` and doubles with every crash of the last `window_s` seconds, up to `max_s`. More than
    `crashes_max` crashes within the window mean that starting again does not help.
    """

    first_s: float = 0.1
    max_s: float = 5.0
    crashes_max: int = 5
    window_s: float = 60.0
    _crashes: deque[float] = field(default_factory=deque[float], repr=False)

    def crashed(self, now: float) -> float | None:
        """Notes a crash at `now` (monotonic seconds). Returns the seconds to wait, or None: give up."""
        while self._crashes and self._crashes[0] <= now - self.window_s:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > self.crashes_max:
            return None
        return min(self.max_s, self.first_s * 2.0 ** (len(self._crashes) - 1))

    @property
    def crashes(self) -> int:
        """Crashes within the window at the last one."""
        return len(self._crashes)


async def supervise(
    make_actor: Callable[[], Awaitable[Actor]], *, backoff: Backoff | None = None, clock: Clock | None = None
) -> None:
    """Runs actors from `make_actor`, one after another, until one stops in good order.

    `make_actor` makes and binds a fresh actor. Raises what killed the last actor when `backoff` gives up, and at once
    what `make_actor` raises. Cancelling it ends the running actor as a crash would.
    """
    backoff = Backoff() if backoff is None else backoff
    clock = SystemClock() if clock is None else clock
    while True:
        actor = await make_actor()
        try:
            await actor.run()
        except Exception as error:
            wait_s = backoff.crashed(clock.monotonic())
            if wait_s is None:
                log.critical("%s crashed %d times: giving up", actor.name, backoff.crashes)
                raise
            log.error("%s crashed (%r): starting again in %.2f s", actor.name, error, wait_s)
            await asyncio.sleep(wait_s)
        else:
            return
