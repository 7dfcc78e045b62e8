"""How long the KV of a prompt is to be kept: the field `prompt_cache_retention` of OpenAI's APIs."""

from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.path.generation import ModelCard

NAME = "prompt_cache_retention"
_SECONDS = {"in_memory": 0.0, "in-memory": 0.0, "24h": 24 * 3600.0}
"""The values of the field; the first two ask for what every prompt gets."""


def keep_s(value: str, card: ModelCard) -> float:
    """Returns how long KV is to be kept on a disk, seconds; 0: as long as there is room.

    A value that nobody knows, or that needs a disk where the model's engines have none, is told as a hint.
    """
    asked_s = _SECONDS.get(value)
    if asked_s is None or (asked_s and not card.kept_block_size):
        ignore(NAME)
        return 0.0
    return asked_s
