"""What all requests of a gateway share."""

from dataclasses import dataclass

from services.gateway.pictures.store import PictureStore
from services.gateway.requests.bus_wait import BusWait
from services.gateway.requests.deliveries import Deliveries
from services.gateway.requests.liveness.progress_watch import ProgressWatch
from services.gateway.requests.lockstep.coordinator import Lockstep
from services.gateway.requests.placement.dispatcher import Dispatcher
from services.gateway.requests.placement.moves import Moves
from services.gateway.requests.router import Router
from services.gateway.requests.service_clients import ServiceClients
from shared.actors.host import Host
from shared.actors.presence import Members


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The objects that all requests of a gateway share."""

    host: Host
    members: Members
    router: Router
    clients: ServiceClients
    dispatcher: Dispatcher
    watch: ProgressWatch
    moves: Moves
    pictures: PictureStore
    lockstep: Lockstep
    bus: BusWait
    deliveries: Deliveries
