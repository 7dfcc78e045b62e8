"""Shadow traffic, see `traffic`."""

from services.gateway.guests.shadow.traffic import ShadowTraffic
from services.gateway.path.actor import GatewayActor
from shared.config import GatewaySettings


def make(gateway: GatewayActor, settings: GatewaySettings) -> ShadowTraffic:
    """See `guests.make_guests`."""
    return ShadowTraffic(gateway.versions, gateway.backend.start_alone, gateway.catalog.find_on_bus)
