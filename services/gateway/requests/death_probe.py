"""Finds engines and detokenizers that died before their leases expire.

A member that misses a heartbeat is asked something. If its process has ended, the bus answers at once that nobody
receives messages on its subject, so it is lost. A process that is only slow or frozen still has its subscription: it
keeps its lease.
"""

from collections.abc import Callable

from services.gateway.requests.sequence_state import Address
from services.gateway.requests.service_clients import ServiceClients
from shared import limits
from shared.actors.background import Background
from shared.actors.host import Host
from shared.actors.presence import Members

PROBED = ("engine", "detokenizer")


class DeathProbe:
    """The probe of one gateway. `on_dead` is called after the member has been removed from `members`.

    It asks nobody for a lease after this gateway's own connection to the bus was down: after a restart of the bus,
    members connect again one after the other.
    """

    def __init__(
        self, host: Host, members: Members, clients: ServiceClients, on_dead: Callable[[Address], None]
    ) -> None:
        self._host, self._members, self._clients, self._on_dead = host, members, clients, on_dead
        self._quiet_until, self._losses = 0.0, host.transport.losses
        self._asked: set[Address] = set()
        """Members that are being asked."""
        self._background = Background("a probe failed")

    def tick(self, now: float) -> None:
        """Asks the members whose last heartbeat is older than PROBE_INTERVALS of their intervals."""
        transport = self._host.transport
        # A connection may have been lost and be back since the last tick.
        if not transport.connected or transport.losses != self._losses:
            self._quiet_until, self._losses = now + limits.LEASE_S, transport.losses
        if now < self._quiet_until:
            return
        for beat, age_s in self._members.ages(now):
            address = Address(beat.id, beat.instance_id)
            is_late = age_s > limits.PROBE_INTERVALS * beat.interval_s
            # A member that ends hands its work over first, and nobody may answer for it meanwhile.
            probed = beat.service in PROBED and beat.state != "draining"
            if is_late and probed and address not in self._asked:
                self._asked.add(address)
                self._background.spawn(self._ask(beat.service, address))

    async def _ask(self, service: str, address: Address) -> None:
        try:
            is_gone = await self._clients.is_gone(service, address)
        finally:
            self._asked.discard(address)
        if is_gone and self._members.forget(service, *address):
            self._on_dead(address)
