"""The length of the context: what the settings ask for, within what the model supports. Imports no PyTorch.

Called by the workers, and by `backends.refusals` before any process starts.
"""

from antiphon.services.engine.models.config_fields import Config
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.kv_groups import freeing_windows
from antiphon.services.engine.models.registry import find_family
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError


def served_description(settings: EngineSettings, config: Config) -> DecoderDescription:
    """Returns the description of a config's decoder as it is served: its context, and what becomes of windows."""
    description = find_family(config).describe(config)
    description = description.for_context(context_length(settings, description))
    return description if settings.cache.disable_hybrid_kv_cache_manager else freeing_windows(description)


def longer_context_notice(settings: EngineSettings, config: Config) -> str | None:
    """Returns the notice that longer contexts must be asked for; None if they need not be, or are."""
    description = find_family(config).describe(config)
    usual, most = description.usual_positions, description.max_positions
    if usual == most or settings.scheduler.max_model_len is not None:
        return None
    return (
        f"the context is {usual} tokens, the length before positions were scaled; --max-model-len allows up to {most}, "
        "with other rotary frequencies for all sequences"
    )


def context_length(settings: EngineSettings, description: DecoderDescription) -> int:
    """Returns the context length of a decoder; see `context_within`."""
    return context_within(settings, description.max_positions, description.usual_positions)


def context_within(settings: EngineSettings, most: int, usual: int | None = None) -> int:
    """Returns the context length: the flag, or else the model's own, `most`, or `usual` if it is given.

    Raises `ServiceError` if the flag is below 1 or above the model's own length.
    """
    asked = settings.scheduler.max_model_len
    if asked is None:
        return most if usual is None else usual
    if not 1 <= asked <= most:
        raise ServiceError(
            "invalid_value",
            f"--max-model-len is {asked}; this model allows 1 to {most} tokens.",
            param="max_model_len",
        )
    return asked
