"""Entry point: `python -m antiphon.services.vision --nats URL --model DIR …`."""

import sys

from antiphon.shared.actors.imports import without_collections

with without_collections():
    from antiphon.services.vision.service import VisionService
    from antiphon.shared.actors.service import main
    from antiphon.shared.config import VisionSettings

if __name__ == "__main__":
    sys.exit(main("vision", VisionSettings, VisionService))
