"""The bus of these tests has the stores of a deployment, which are made anew after a restart, as by a launcher."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.shared.deployment.store_keeper import keep
from antiphon.shared.settings.records import KeeperSettings
from tests.conftest import Connect, NatsServer


@pytest.fixture
async def nats_connect(nats_connect: Connect, namespace: str) -> AsyncIterator[Connect]:
    """See tests.conftest."""
    keeping: dict[str, asyncio.Task[None]] = {}

    async def connect(server: NatsServer, name: str, **options: Any) -> Any:
        if server.url not in keeping:
            settings = KeeperSettings(
                nats=server.url, nats_credentials=server.credentials, namespace=namespace, service_id="setup"
            )
            keeping[server.url] = asyncio.create_task(keep(settings, lambda _: None))
        return await nats_connect(server, name, **options)

    yield connect
    for task in keeping.values():
        task.cancel()
    await asyncio.gather(*keeping.values(), return_exceptions=True)
