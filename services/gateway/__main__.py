"""Entry point: `python -m services.gateway --nats URL --port N …`."""

import sys

from shared.actors.imports import without_collections

with without_collections():
    from services.gateway.service import GatewayService
    from shared.actors.service import main
    from shared.config import GatewaySettings

if __name__ == "__main__":
    sys.exit(main("gateway", GatewaySettings, GatewayService))
