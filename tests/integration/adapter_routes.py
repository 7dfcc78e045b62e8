"""The routes for adapters, without a bus. No tests."""

from unittest.mock import AsyncMock

from services.gateway.guests.adapters.endpoints import AdapterEndpoints
from services.gateway.path.generation import Backend
from services.gateway.path.guest import Guest, Route


class AdapterRoutes(Guest):
    """A guest that has only the routes."""

    def routes(self, backend: Backend) -> list[Route]:
        return AdapterEndpoints(backend, AsyncMock()).routes()
