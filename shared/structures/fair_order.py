"""Weighted fair queueing of clients: the order in which waiting clients are served, by tokens in proportion to weights.

Each client has a virtual time: the tokens that it got, divided by its weight. The client with waiting work and the
smallest virtual time is next. A client that had no work starts at the virtual time of the client served last, so that
idle time earns no credit. Clients with a lower priority number go before all others.

Pure. Used by the gateway's queue and by the engine's queue; each keeps the order of the work of a single client itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

IDLE_MAX = 1024
"""Maximum number of clients without waiting work that are remembered because they got more than their share."""


@dataclass(slots=True)
class _Share:
    weight: float
    priority: int
    time: float
    number: int
    """Order in which clients got waiting work; breaks ties between equal times."""


class FairOrder:
    """The virtual times of clients, by name."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Share] = {}
        self._idle: dict[str, _Share] = {}
        self._now: dict[int, float] = {}
        """For each priority: the virtual time of the client served last."""
        self._num_activated = 0

    def activate(self, name: str, weight: float = 1.0, priority: int = 0) -> None:
        """Records that a client has waiting work; also takes over a changed weight or priority. May be repeated."""
        share = self._waiting.get(name)
        if share is None:
            share = self._idle.pop(name, None) or _Share(weight, priority, 0.0, 0)
            self._num_activated += 1
            share.number = self._num_activated
            self._waiting[name] = share
            share.time = max(share.time, self._now.get(priority, 0.0))
        elif share.priority != priority:
            share.time = max(share.time, self._now.get(priority, 0.0))
        share.weight, share.priority = weight, priority

    def deactivate(self, name: str) -> None:
        """Records that a client has no waiting work any more."""
        share = self._waiting.pop(name)
        if share.time > self._now.get(share.priority, 0.0):
            self._idle[name] = share
        if len(self._idle) > IDLE_MAX:
            self._idle = {n: s for n, s in self._idle.items() if s.time > self._now.get(s.priority, 0.0)}
            while len(self._idle) > IDLE_MAX:
                del self._idle[next(iter(self._idle))]

    def first(self, eligible: Callable[[str], bool] | None = None) -> str | None:
        """Returns the client to serve next, of those that are eligible; None if there is none.

        Clients with a higher priority number than another one with waiting work are never eligible.
        """
        if not self._waiting:
            return None
        first = min(self._waiting, key=self._rank)
        if eligible is None or eligible(first):
            return first
        priority = self._waiting[first].priority
        names = (name for name, share in self._waiting.items() if share.priority == priority and eligible(name))
        return min(names, key=self._rank, default=None)

    def serve(self, name: str, tokens: float) -> None:
        """Charges a client for waiting work that is served now."""
        share = self._waiting[name]
        self._now[share.priority] = max(share.time, self._now.get(share.priority, 0.0))
        share.time += tokens / share.weight

    def adjust(self, name: str, tokens: float) -> None:
        """Charges a client for tokens beyond an earlier charge, or credits tokens (if negative)."""
        share = self._waiting.get(name) or self._idle.get(name)
        if share is not None:
            share.time += tokens / share.weight

    def _rank(self, name: str) -> tuple[int, float, int]:
        share = self._waiting[name]
        return share.priority, share.time, share.number
