"""When a gateway may judge the silence of members: not while it was itself delayed, or disconnected from the bus."""

from antiphon.shared import limits
from antiphon.shared.bus.transport import Transport
from antiphon.shared.clock import Clock

TICK_S = limits.HEARTBEAT_INTERVAL_S
"""Interval of the liveness check, in seconds. The check runs when a heartbeat arrives, so that an idle process is not
woken just for this check. Heartbeats of all members arrive at almost the same time; the first one that arrives at least
half an interval after the last check starts the next check.
"""
WATCH_S = 1.5 * TICK_S
"""Time without a liveness check after which it runs because no heartbeat has arrived. Seconds."""
OWN_PAUSE_S = limits.LEASE_S - TICK_S
"""If two checks are further apart than this, in seconds, this process itself was delayed. Messages that arrived
meanwhile may not be handled yet, so the silence of members does not count."""


class Pulse:
    """The liveness checks of one gateway."""

    def __init__(self, clock: Clock, transport: Transport) -> None:
        self._clock, self._transport = clock, transport
        self._ticked_at = clock.monotonic()
        self.was_late = False
        """Whether this process was delayed before the last check."""
        self.connected = True
        """Whether the bus could be reached at the last check."""

    def is_due(self, now: float) -> bool:
        """Whether a heartbeat that arrives now starts a check."""
        return now - self._ticked_at >= TICK_S / 2

    def link_changed(self) -> bool:
        """Updates `connected`, and returns whether that has changed it."""
        before, self.connected = self.connected, self._transport.connected
        return before != self.connected

    def stood_still(self, now: float) -> bool:
        """Notes a check, and returns whether this process was delayed since the last one.

        Then received messages may not be handled yet. Returns False at the check after a delayed one: the messages have
        been handled by then.
        """
        late = now - self._ticked_at > OWN_PAUSE_S and not self.was_late
        self._ticked_at, self.was_late = now, late
        return late

    def judging_time(self) -> float:
        """Returns the time for judging leases: now, or that of the last check if this process was delayed since.

        Reading a long request body may delay the process for longer than a lease.
        """
        now = self._clock.monotonic()
        return self._ticked_at if now - self._ticked_at > OWN_PAUSE_S else now
