"""Entry point: `python -m services.vision --nats URL --model DIR …`."""

import sys

from shared.actors.imports import without_collections

with without_collections():
    from services.vision.service import VisionService
    from shared.actors.service import main
    from shared.config import VisionSettings

if __name__ == "__main__":
    sys.exit(main("vision", VisionSettings, VisionService))
