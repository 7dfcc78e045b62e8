"""Entry point: `python -m antiphon.services.gateway --nats URL --port N …`."""

import sys

from antiphon.shared.actors.imports import without_collections

with without_collections():
    from antiphon.services.gateway.service import GatewayService
    from antiphon.shared.actors.service import main
    from antiphon.shared.config import GatewaySettings

if __name__ == "__main__":
    sys.exit(main("gateway", GatewaySettings, GatewayService))
