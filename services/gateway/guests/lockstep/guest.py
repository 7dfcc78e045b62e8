"""Lockstep: two engines compute a request, and the client gets the tokens on which both agree."""

from services.gateway.guests.lockstep.coordinator import Lockstep
from services.gateway.path.actor import GatewayActor
from shared.config import GatewaySettings


def make(gateway: GatewayActor, settings: GatewaySettings) -> Lockstep:
    """See `guests.make_guests`."""
    return Lockstep(gateway, settings.lockstep)
