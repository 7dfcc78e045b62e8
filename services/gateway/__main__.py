"""Entry point: `python -m services.gateway --nats URL --port N …`."""

import sys

from services.gateway.service import GatewayService
from shared.actors.service import main
from shared.config import GatewaySettings

if __name__ == "__main__":
    sys.exit(main("gateway", GatewaySettings, GatewayService))
