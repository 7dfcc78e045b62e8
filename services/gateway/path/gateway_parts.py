"""What all requests of a gateway share."""

from dataclasses import dataclass

from services.gateway.path.guest import Guests
from services.gateway.path.liveness.bus_wait import BusWait
from services.gateway.path.liveness.progress_watch import ProgressWatch
from services.gateway.path.placement.dispatcher import Dispatcher
from services.gateway.path.placement.moves import Moves
from services.gateway.path.router import Router
from services.gateway.path.service_clients import ServiceClients
from shared.actors.host import Host
from shared.actors.presence import Members


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
