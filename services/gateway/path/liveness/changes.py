"""Which members have joined, begun to drain or been lost, as one gateway saw it. Pure; times are given.

A member that ends after it has drained is not lost.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from antiphon.shared import limits
from antiphon.shared.clock import Clock
from antiphon.shared.messages import Heartbeat, ServiceName

Kind = Literal["joined", "draining", "lost"]
JOIN_S = 2.0
"""A member that is heard first when it has sent heartbeats for longer than this is not new: the gateway is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberChange:
    """`at_s`: monotonic seconds. `reason`: of a loss; else empty."""

    kind: Kind
    service: ServiceName
    id: str
    instance_id: str
    at_s: float
    reason: str = ""


class MemberChanges:
    """The latest changes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.events: deque[MemberChange] = deque(maxlen=limits.MEMBER_CHANGES_MAX)
        """The oldest first."""
        self._lost: deque[MemberChange] = deque(maxlen=limits.LOST_MEMBERS_MAX)

    def observe(self, beat: Heartbeat, before: Heartbeat | None) -> bool:
        """Notes what a heartbeat shows. `before`: the last one of the same id. Returns whether a lost member is back.

        A new instance of an id whose loss was not noticed counts as joined too.
        """
        if before is None or before.instance_id != beat.instance_id:
            was_lost = any((one.service, one.id) == (beat.service, beat.id) for one in self._lost)
            if was_lost or beat.sequence * beat.interval_s <= JOIN_S:
                self._note("joined", beat)
            return was_lost
        if beat.state == "draining" and before.state != "draining":
            self._note("draining", beat)
        return False

    def lost(self, member: Heartbeat, reason: str) -> None:
        """Notes a loss, unless the member was draining."""
        if member.state != "draining":
            self._lost.append(self._note("lost", member, reason))

    def recently_lost(self) -> list[MemberChange]:
        """Returns the losses of the last LOST_MEMBERS_S, the newest first."""
        since = self._clock.monotonic() - limits.LOST_MEMBERS_S
        return [one for one in reversed(self._lost) if one.at_s >= since]

    def _note(self, kind: Kind, member: Heartbeat, reason: str = "") -> MemberChange:
        change = MemberChange(
            kind=kind,
            service=member.service,
            id=member.id,
            instance_id=member.instance_id,
            at_s=self._clock.monotonic(),
            reason=reason,
        )
        self.events.append(change)
        return change
