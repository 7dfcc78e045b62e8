"""Selects the matrices that are quantized while a model with plain weights is loaded, and quantizes them.

The linear layers of attention and MLP are quantized, including experts, and the output head. The head always gets 8
bits: it is the widest matrix of a small model, and 4 bits would change the choice of tokens. Modes that round the rows
of products to 8 bits round those of the head too. With `fp8` the head is not
quantized, as in vLLM. Embeddings, routers and norms are not quantized. Neither are the matrices that compute keys and
values from latents, because attention multiplies them from both sides. Called by the workers through `choice`.
"""

from collections.abc import Callable

from torch import Tensor

from antiphon.services.engine.quantization.rounding import quantize_fp8, quantize_int8, quantize_nf4
from antiphon.services.engine.quantization.weight import Quantize, QuantizedWeight
from antiphon.shared.settings.quantization import ROUNDS_ROWS, OnlineMode

QUANTIZED_MATRICES = frozenset(
    {"qkv", "q_up", "o", "mix_in", "mix_out", "up", "down", "experts.up", "experts.down", "shared.up", "shared.down"}
)
"""Names of matrices within a layer."""
HEAD = "head"
ROUNDED_COLUMNS_MAX = 2**16
"""Most inputs of a product of 8-bit numbers: the sums are integers of 32 bits."""
_ROUND: dict[OnlineMode, Callable[[Tensor], QuantizedWeight]] = {
    "ifq": lambda weight: quantize_int8(weight),
    "ifq_w8a8": lambda weight: _with_rounded_rows(weight),
    "ifq_w4a8": lambda weight: quantize_nf4(weight, kind="int4_dynamic"),
    "ifq_nf4": lambda weight: quantize_nf4(weight),
    "fp8": quantize_fp8,
}


def online_quantizer(mode: OnlineMode) -> Quantize:
    """Returns the function that quantizes a model's matrices for a value of `--quantization`."""
    rounded = _ROUND[mode]

    def quantize(name: str, weight: Tensor) -> Tensor | QuantizedWeight:
        if name == HEAD and mode != "fp8":
            return _with_rounded_rows(weight) if mode in ROUNDS_ROWS else quantize_int8(weight)
        return rounded(weight) if name in QUANTIZED_MATRICES else weight

    return quantize


def _with_rounded_rows(weight: Tensor) -> QuantizedWeight:
    """Quantizes to 8 bits for products whose rows are rounded to 8 bits too, if their sums fit into 32 bits."""
    return quantize_int8(weight, "int8_dynamic" if weight.shape[1] <= ROUNDED_COLUMNS_MAX else "int8")
