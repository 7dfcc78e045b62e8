"""Entry point: `python -m services.tokenizer --nats URL --model DIR …`."""

import sys

from shared.actors.imports import without_collections

with without_collections():
    from services.tokenizer.service import TokenizerService
    from shared.actors.service import main
    from shared.config import TokenizerSettings

if __name__ == "__main__":
    sys.exit(main("tokenizer", TokenizerSettings, TokenizerService))
