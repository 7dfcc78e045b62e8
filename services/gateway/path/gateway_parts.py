"""What all requests of a gateway share."""

from dataclasses import dataclass

from antiphon.services.gateway.path.guest import Guests
from antiphon.services.gateway.path.liveness.bus_wait import BusWait
from antiphon.services.gateway.path.liveness.progress_watch import ProgressWatch
from antiphon.services.gateway.path.placement.dispatcher import Dispatcher
from antiphon.services.gateway.path.placement.moves import Moves
from antiphon.services.gateway.path.router import Router
from antiphon.services.gateway.path.service_clients import ServiceClients
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """The objects that all requests of a gateway share."""

    host: Host
    members: Members
    router: Router
    clients: ServiceClients
    dispatcher: Dispatcher
    watch: ProgressWatch
    moves: Moves
    guests: Guests
    bus: BusWait
