"""`--deterministic` on a GPU: a token has the same bits whatever else a step computes, and whichever step computes it.

Each operation then has one form for all steps, in which the order of its sums follows from the model alone: `fixed`
products of plain weights and `tiles` of quantized ones (`autotune.tuning.SAME_BITS`), the prefill kernel for the
attention of all sequences (`Heads.one_form`), tiles of one size for experts (`mixed_experts`). Several GPUs gather
their parts of a sum and add them in the order of the ranks (`TorchCommunicator`), so that the bits depend on their
number, which is part of the configuration. Norms, rotations, recurrent states, adapters and sampling have one form
anyway. It takes more time, most with long contexts of few
sequences, whose keys are not divided among programs. At the start the engine compares a sequence alone with the same
one in a batch (`canary.measure.check_deterministic`).
"""

from antiphon.services.engine.models.description import DecoderDescription
from antiphon.shared.config import EngineSettings

_LIBRARY = "the GPU's library of matrix products orders its sums by the number of tokens of a step"


def variant_because(settings: EngineSettings, description: DecoderDescription) -> str:
    """Returns why a token's bits may depend on the step (`EngineFacts.variant_because`); empty if they do not."""
    if not settings.execution.deterministic:
        return _LIBRARY
    if description.latent is not None:
        return f"{_LIBRARY}, and latent attention has no other products"
    return ""
