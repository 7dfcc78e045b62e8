"""The length of the context: what the settings ask for, within what the model supports. Imports no PyTorch.

Called by the workers, and by `backends.refusals` before any process starts.
"""

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError


def context_length(settings: EngineSettings, description: DecoderDescription) -> int:
    """Returns the context length of a decoder; see `context_within`."""
    return context_within(settings, description.max_positions)


def context_within(settings: EngineSettings, most: int) -> int:
    """Returns the context length: the flag, or else the model's own, `most`.

    Raises `ServiceError` if the flag is below 1 or above the model's own length.
    """
    asked = settings.scheduler.max_model_len
    if asked is None:
        return most
    if not 1 <= asked <= most:
        raise ServiceError(
            "invalid_value",
            f"--max-model-len is {asked}; this model allows 1 to {most} tokens.",
            param="max_model_len",
        )
    return asked
