"""Chooses the data types of weights, activations and KV cache from the settings, the checkpoint and the hardware.

Called by the workers when they load a model.
"""

import logging
import platform
from pathlib import Path

import torch

from antiphon.services.engine.models.description import DtypeName
from antiphon.services.engine.worker.capacity.memory import free_bytes
from antiphon.services.engine.worker.loading.model_files import weight_file_bytes

logger = logging.getLogger(__name__)

_DTYPES: dict[str, torch.dtype] = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
_X86 = ("x86_64", "AMD64")
_SHARE_FOR_WEIGHTS = 0.6
"""Maximum share of free memory for float32 weights; the rest is for the KV cache and the steps."""


def choose_dtype(asked: str, stored: DtypeName, device: torch.device) -> torch.dtype:
    """Returns the type of weights and activations, and by default of the KV cache.

    An explicit type takes precedence. `auto` keeps the checkpoint's type, with two exceptions: a CPU runs float16
    checkpoints as bfloat16, which it computes with natively, and a GPU runs float32 checkpoints as float16.
    """
    if asked != "auto":
        return _DTYPES[asked]
    if device.type == "cpu":
        return torch.bfloat16 if stored == "float16" else _DTYPES[stored]
    return torch.float16 if stored == "float32" else _DTYPES[stored]


def choose_torch_dtype(asked: str, stored: DtypeName, device: torch.device, model_dir: Path) -> torch.dtype:
    """Like `choose_dtype`, for PyTorch's own operations, whose 16-bit products of many rows are slow on some CPUs.

    On such a CPU a prompt takes five times as long in 16 bits as in 32 bits, and a decode step of one sequence takes
    0.8 times as long. So `auto` chooses float32 there if the weights fit into memory.
    """
    chosen = choose_dtype(asked, stored, device)
    if asked != "auto" or device.type != "cpu" or chosen == torch.float32 or _multiplies_16_bits():
        return chosen
    wide = weight_file_bytes(model_dir) * 2
    if wide > free_bytes() * _SHARE_FOR_WEIGHTS:
        logger.warning(
            "PyTorch multiplies %s slowly on this processor, and in float32 the weights would take %.1f GiB: "
            "use a machine with a C++ compiler or more memory, or a smaller model",
            chosen,
            wide / 2**30,
        )
        return chosen
    logger.info("PyTorch multiplies %s slowly on this processor: computing in float32", chosen)
    return torch.float32


def choose_cache_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of the KV cache: the model's, or 8 bits. `fp8` means e4m3, which has the longer mantissa."""
    if asked == "auto":
        return dtype
    return torch.float8_e5m2 if asked == "fp8_e5m2" else torch.float8_e4m3fn


def _multiplies_16_bits() -> bool:
    """Whether PyTorch's 16-bit matrix products are fast on this CPU: on x86, PyTorch needs AVX-512 for that."""
    return platform.machine() not in _X86 or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
