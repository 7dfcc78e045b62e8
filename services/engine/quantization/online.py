"""Chooses the matrices that are quantized while a model with plain weights is loaded, and rounds them.

Quantized are the linear layers of attention and MLP, experts included, and the output head, which always gets 8 bits:
it is the widest matrix of a small model, and 4 bits of it would change the choice of tokens. With `fp8` the head stays
as it is, as in vLLM. Embedding, routers and norms stay as they are, and so do the matrices that make keys and values of
latents, which attention multiplies from both sides. Called by the workers through `choice`.
"""

from collections.abc import Callable

from torch import Tensor

from services.engine.quantization.rounding import quantize_fp8, quantize_int8, quantize_nf4
from services.engine.quantization.weight import Quantize, QuantizedWeight
from shared.settings.quantization import OnlineMode

QUANTIZED_MATRICES = frozenset(
    {"qkv", "q_up", "o", "up", "down", "experts.up", "experts.down", "shared.up", "shared.down"}
)
"""Names of matrices within a layer."""
HEAD = "head"
_ROUND: dict[OnlineMode, Callable[[Tensor], QuantizedWeight]] = {
    "ifq": lambda weight: quantize_int8(weight),
    "ifq_nf4": lambda weight: quantize_nf4(weight),
    "fp8": quantize_fp8,
}


def online_quantizer(mode: OnlineMode) -> Quantize:
    """Returns the function that rounds a model's matrices as `--quantization` says."""
    rounded = _ROUND[mode]

    def quantize(name: str, weight: Tensor) -> Tensor | QuantizedWeight:
        if name == HEAD and mode != "fp8":
            return quantize_int8(weight)
        return rounded(weight) if name in QUANTIZED_MATRICES else weight

    return quantize
