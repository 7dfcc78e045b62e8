"""Finds engines and detokenizers that died before their leases expire.

A member that misses a heartbeat, or whose launcher says that its process has ended, is sent a question. If the process
has ended, the bus answers at once that nobody receives messages on its subject, so the member counts as lost. A process
that is only slow or frozen still has its subscription: if it answers, its lease is renewed, otherwise it runs on.
"""

import logging
from collections.abc import Callable, Sequence

from antiphon.services.gateway.path.liveness.loss_report import ENDED
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.services.gateway.path.service_clients import ProbeResult, ServiceClients
from antiphon.shared import limits
from antiphon.shared.actors.background import Background
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.bus.transport import Delivery
from antiphon.shared.codec import DecodeError, Decoder
from antiphon.shared.messages import Heartbeat, MemberEnded
from antiphon.shared.observability.rare_logs import RareLog

log = logging.getLogger(__name__)
PROBED = ("engine", "detokenizer")
ENDED_WAITS_S = (0.02, 0.04, 0.08, 0.16)
"""How long to wait for each answer of a member of which a launcher says that it has ended, seconds. A question that the
bus has sent to the closed connection gets no answer at all, so the member is asked again: a busy bus needs some time to
notice that a connection is closed."""
_ENDED = Decoder([MemberEnded])


class DeathProbe:
    """The probe of one gateway. `on_dead` is called after the member has been removed from `members`.

    After this gateway's own connection to the bus was down, the probe asks nobody for `RECONNECT_S`.
    """

    def __init__(
        self, host: Host, members: Members, clients: ServiceClients, on_dead: Callable[[Heartbeat, str], None]
    ) -> None:
        self._host, self._members, self._clients, self._on_dead = host, members, clients, on_dead
        self._quiet_until, self._losses = 0.0, host.transport.losses
        self._asked: set[Address] = set()
        """Members that are being asked."""
        self._background = Background("a probe failed")
        self._rare = RareLog(log)

    async def listen(self) -> None:
        """Subscribes to the launchers' messages about processes that have ended."""
        await self._host.transport.subscribe(self._host.subjects.ended(), self._on_ended)

    def tick(self, now: float) -> None:
        """Asks the members whose last heartbeat is older than PROBE_INTERVALS heartbeat intervals."""
        if self._is_quiet(now):
            return
        for beat, age_s in self._members.ages(now):
            if age_s > limits.PROBE_INTERVALS * beat.interval_s:
                self._look(beat)

    def _on_ended(self, delivery: Delivery) -> None:
        try:
            ended = _ENDED.decode(delivery.payload)
        except DecodeError as error:
            self._rare.warning("malformed", "malformed message on %s: %s", delivery.subject, error)
            return
        beat = self._members.get(ended.service, ended.member_id)
        if beat is not None and not self._is_quiet(self._host.clock.monotonic()):
            self._look(beat, ENDED_WAITS_S)

    def _is_quiet(self, now: float) -> bool:
        transport = self._host.transport
        # A connection may have been lost and be back since the last call.
        if not transport.connected or transport.losses != self._losses:
            self._quiet_until, self._losses = now + limits.RECONNECT_S, transport.losses
        return now < self._quiet_until

    def _look(self, beat: Heartbeat, waits_s: Sequence[float] = (limits.LEASE_S,)) -> None:
        address = Address(beat.id, beat.instance_id)
        # A draining member hands its work over before it ends; meanwhile, nobody may answer on its subject.
        if beat.service in PROBED and beat.state != "draining" and address not in self._asked:
            self._asked.add(address)
            self._background.spawn(self._ask(beat, address, waits_s))

    async def _ask(self, beat: Heartbeat, address: Address, waits_s: Sequence[float]) -> None:
        service = beat.service
        result: ProbeResult = "silent"
        try:
            for wait_s in waits_s:
                result = await self._clients.probe(service, address, wait_s)
                if result != "silent":
                    break
        finally:
            self._asked.discard(address)
        if result == "answers":
            self._members.heard(service, *address, self._host.clock.monotonic())
        if result == "gone" and self._members.forget(service, *address):
            self._on_dead(beat, ENDED)
