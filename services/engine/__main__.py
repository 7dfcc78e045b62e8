"""Entry point: `python -m antiphon.services.engine --nats URL --model DIR …`."""

import sys

from antiphon.shared.actors.imports import without_collections

with without_collections():
    from antiphon.services.engine.service import EngineService
    from antiphon.shared.actors.service import main
    from antiphon.shared.config import EngineSettings

if __name__ == "__main__":
    sys.exit(main("engine", EngineSettings, EngineService, heartbeat_thread=True))
