"""LoRA adapters and prompt adapters, which requests name like models."""

from services.gateway.guests.adapters.directory import AdapterDirectory
from services.gateway.path.actor import GatewayActor
from shared.config import GatewaySettings


def make(gateway: GatewayActor, settings: GatewaySettings) -> AdapterDirectory:
    """See `guests.make_guests`."""
    return AdapterDirectory(gateway)
