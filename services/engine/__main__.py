"""Entry point: `python -m services.engine --nats URL --model DIR …`."""

import sys

from shared.actors.imports import without_collections

with without_collections():
    from services.engine.service import EngineService
    from shared.actors.service import main
    from shared.config import EngineSettings

if __name__ == "__main__":
    sys.exit(main("engine", EngineSettings, EngineService, heartbeat_thread=True))
