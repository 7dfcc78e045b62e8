"""Entry point: `python -m antiphon.services.tokenizer --nats URL --model DIR …`."""

import sys

from antiphon.shared.actors.imports import without_collections

with without_collections():
    from antiphon.services.tokenizer.service import TokenizerService
    from antiphon.shared.actors.service import main
    from antiphon.shared.config import TokenizerSettings

if __name__ == "__main__":
    sys.exit(main("tokenizer", TokenizerSettings, TokenizerService))
