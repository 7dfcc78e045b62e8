"""Gives the API of sessions what it needs of the bus."""

from antiphon.services.gateway.guests.sessions.blocks import EngineBlocks
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.shared.config import GatewaySettings


def make(gateway: GatewayActor, settings: GatewaySettings) -> EngineBlocks:
    """See `guests.make_guests`."""
    return EngineBlocks(gateway)
