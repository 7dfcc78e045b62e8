"""The options of one run of the quantization tool."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Algorithm = Literal["weight_only_int8", "smooth_quant", "awq", "gptq"]
DtypeOption = Literal["fp16", "bf16"]
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
"""`-t` → name of the type in config.json."""
LARGE_EMBEDDING = 0.1
"""Share of a model's weights. With a larger embedding that keeps its type, files of 8 bits have over 0.55 of the bytes
of the original."""
_STRENGTH, _STRENGTHS = 0.8, {"chatglm": 0.75, "glm": 0.75, "glm-130b": 0.75}
_GLM_130B_LAYERS = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The options of a run."""

    model: Path
    output: Path
    algorithm: Algorithm
    tensor_parallel: int
    dtype: DtypeOption
    strength: float | None = None
    """smooth_quant: share of the activations' range that moves into the weights, 0 … 1; None: the model's default."""
    token_file: Path | None = None
    multi_query: bool = False
    activation_order: bool = False
    """gptq: whether the most important inputs are rounded first, and groups have inputs from all over a matrix."""

    rounds_embedding: bool | None = None
    """weight_only_int8: whether the embedding has 8 bits too. Not all other packages read such an embedding.
    None: if it is more than `LARGE_EMBEDDING` of the weights."""

    def record(self) -> dict[str, object]:
        """Returns the options that influence the result, as JSON values."""
        options = asdict(self)
        del options["output"]
        return options | {"model": str(self.model.resolve()), "token_file": self.token_file and str(self.token_file)}


def default_strength(model_type: str, num_layers: int) -> float:
    """Returns the default of `-sq`: 0.75 for GLM-130B, 0.8 for Llama and every other model."""
    is_130b = model_type in _STRENGTHS and (model_type == "glm-130b" or num_layers == _GLM_130B_LAYERS)
    return _STRENGTHS[model_type] if is_130b else _STRENGTH
