"""Entry point: `python -m services.detokenizer --nats URL --model DIR …`."""

import sys

from shared.actors.imports import without_collections

with without_collections():
    from services.detokenizer.service import DetokenizerService
    from shared.actors.service import main
    from shared.config import DetokenizerSettings

if __name__ == "__main__":
    sys.exit(main("detokenizer", DetokenizerSettings, DetokenizerService))
