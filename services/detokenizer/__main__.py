"""Entry point: `python -m antiphon.services.detokenizer --nats URL --model DIR …`."""

import sys

from antiphon.shared.actors.imports import without_collections

with without_collections():
    from antiphon.services.detokenizer.service import DetokenizerService
    from antiphon.shared.actors.service import main
    from antiphon.shared.config import DetokenizerSettings

if __name__ == "__main__":
    sys.exit(main("detokenizer", DetokenizerSettings, DetokenizerService))
