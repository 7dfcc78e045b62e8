"""The settings of the HTTP server around the gateway's application."""

from fastapi import FastAPI

from antiphon.services.gateway.service import server_config
from antiphon.shared.config import GatewaySettings

CLIENT_POOL_IDLE_S = 60
"""The longest that common clients and proxies keep an idle connection for their next request."""


def test_an_idle_connection_is_left_for_the_client_to_close() -> None:
    assert server_config(FastAPI(), GatewaySettings()).timeout_keep_alive > CLIENT_POOL_IDLE_S
