"""Adds a point to the history every two seconds, when the gateway is awake for its liveness check anyway."""

from collections.abc import Callable, Sequence
from typing import Any

from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.services.gateway.ops.history.points import Points
from antiphon.services.gateway.ops.history.readings import ENGINE_SERIES, SERIES, Readings, whole
from antiphon.services.gateway.path.guest import Guest
from antiphon.services.gateway.path.liveness.changes import MemberChanges
from antiphon.shared import limits
from antiphon.shared.clock import Clock
from antiphon.shared.messages import Heartbeat


class History(Guest):
    """The history of one gateway. `members` returns the living members with the ages of their heartbeats."""

    def __init__(
        self, clock: Clock, members: Callable[[], Sequence[tuple[Heartbeat, float]]], changes: MemberChanges
    ) -> None:
        self._clock, self._members, self._changes = clock, members, changes
        self._metrics: GatewayMetrics | None = None
        self._readings = Readings()
        self._points = Points(
            SERIES, ENGINE_SERIES, capacity=limits.HISTORY_POINTS, groups_max=limits.HISTORY_ENGINES_MAX
        )
        # Unix time that does not jump when the machine's clock is set.
        self._offset_s = clock.time_ns() / 1e9 - clock.monotonic()
        self._due = clock.monotonic()

    def follow(self, metrics: GatewayMetrics) -> None:
        """Takes latencies from these metrics."""
        self._metrics = metrics

    def tick(self) -> None:
        """See Guest. Does nothing until a point is due."""
        now = self._clock.monotonic()
        if now < self._due:
            return
        # A check may come one heartbeat after the point is due; the next point is due on the grid nevertheless.
        self._due = max(self._due, now - limits.HEARTBEAT_INTERVAL_S) + limits.HISTORY_INTERVAL_S
        self.sample(now)

    def sample(self, now: float) -> None:
        """Adds a point. `now`: monotonic seconds."""
        members, metrics = self._members(), self._metrics
        engines = self._readings.engines(members, now)
        values = whole(engines, self._readings.gateways(members, now))
        if metrics is not None:
            values |= self._readings.latencies(metrics.first_token_counts(), metrics.tokens.gap_counts())
        self._points.add(now + self._offset_s, values, engines)

    def since(self, time: float) -> dict[str, Any]:
        """Returns the points and events later than `time`, Unix seconds, as the answer of `GET /admin/history`."""
        times, series, engines = self._points.since(time)
        return {
            "object": "history",
            "interval_s": limits.HISTORY_INTERVAL_S,
            "now": self._clock.monotonic() + self._offset_s,
            "time": times,
            "series": series,
            "engines": engines,
            "events": [
                {"time": event_s, "kind": one.kind, "service": one.service, "id": one.id}
                for one in self._changes.events
                if (event_s := one.at_s + self._offset_s) > time
            ],
        }
