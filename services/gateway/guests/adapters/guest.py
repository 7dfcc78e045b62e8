"""LoRA adapters and prompt adapters, which requests name like models."""

from collections.abc import Sequence

from services.gateway.guests.adapters.directory import AdapterDirectory
from services.gateway.guests.adapters.endpoints import AdapterEndpoints
from services.gateway.path.actor import GatewayActor
from services.gateway.path.generation import Backend
from services.gateway.path.guest import Route
from shared.config import GatewaySettings


class Adapters(AdapterDirectory):
    """The adapters, with the routes that load and unload them."""

    def routes(self, backend: Backend) -> Sequence[Route]:
        """See Guest."""
        return AdapterEndpoints(backend, self).routes()


def make(gateway: GatewayActor, settings: GatewaySettings) -> Adapters:
    """See `guests.make_guests`."""
    return Adapters(gateway)
