"""Chooses the device and the backend for an engine's settings. Called by the engine's shells."""

import importlib.util
import logging
from pathlib import Path

import torch

from services.engine.cpu.worker import load_cpu_worker
from services.engine.models.registry import has_family
from services.engine.worker.model_files import read_config
from services.engine.worker.seam import ModelWorker
from services.engine.worker.torch_worker import TorchWorker
from shared.config import EngineSettings, SettingsError
from shared.errors import ServiceError
from shared.model_files import model_directory

logger = logging.getLogger(__name__)

_OLDEST, _OLDEST_WITH_FLOAT8 = (8, 0), (8, 9)


def load_worker(settings: EngineSettings) -> ModelWorker:
    """A loaded worker. Raises `SettingsError` or `ServiceError` for settings or a model that cannot work."""
    model_dir, device = model_directory(settings), choose_device(settings.device)
    if settings.load_format == "safetensors" and not any(model_dir.glob("*.safetensors")):
        raise SettingsError(f"--load-format=safetensors: {model_dir} has no file of that kind; leave the option out")
    for notice in cpu_notices(settings) if device.type == "cpu" else ():
        logger.info("%s", notice)
    if uses_triton(settings, device, model_dir):
        # Imported here: a CPU does without Triton.
        from services.engine.worker.triton_worker import TritonWorker

        return TritonWorker(settings, model_dir, device)
    if device.type == "cpu" and settings.cpu_backend != "torch":
        worker = load_cpu_worker(settings, model_dir)
        if worker is not None:
            return worker
    return TorchWorker(settings, model_dir, device)


def cpu_notices(settings: EngineSettings) -> list[str]:
    """What was asked for and changes nothing on a CPU: it has no graphs to capture."""
    asked = {
        "--enforce-eager": settings.enforce_eager,
        "--max-seq-len-to-capture": settings.max_seq_len_to_capture != EngineSettings().max_seq_len_to_capture,
    }
    return [f"{flag} changes nothing on a CPU: every step runs without CUDA graphs" for flag in asked if asked[flag]]


def uses_triton(settings: EngineSettings, device: torch.device, model_dir: Path) -> bool:
    """Whether the GPU kernels compute. Raises `SettingsError` for a CPU without their interpreter.

    A model without a description, or a device or type that the kernels do not serve, is left to PyTorch's operations.
    """
    if device.type == "cpu":
        if settings.cpu_backend != "triton":
            return False
        if not _interprets():
            raise SettingsError("--cpu-backend=triton is for tests: it needs TRITON_INTERPRET=1 in the environment")
        logger.warning("the GPU kernels run under Triton's interpreter: very slowly, for tests")
        return True
    if settings.cuda_backend != "auto":
        return False
    reason = _reason_for_torch(settings, device, model_dir)
    if reason is not None:
        logger.warning("the Triton kernels are not used: %s. PyTorch's operations compute instead", reason)
    return reason is None


def _reason_for_torch(settings: EngineSettings, device: torch.device, model_dir: Path) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not has_family(read_config(model_dir)):
        return "this architecture runs through transformers"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < _OLDEST:
        return "they need a device of compute capability 8.0 or newer"
    if settings.kv_cache_dtype != "auto" and torch.cuda.get_device_capability(device) < _OLDEST_WITH_FLOAT8:
        return f"--kv-cache-dtype {settings.kv_cache_dtype} needs compute capability 8.9 or newer there"
    return None


def _interprets() -> bool:
    """Triton's own setting; it must have been there before Triton was imported."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]


def choose_device(asked: str) -> torch.device:
    """`auto` takes a CUDA device where there is one; asking for one that is not there is a `ServiceError`."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ServiceError("invalid_value", "--device cuda: no CUDA device is available here.", param="device")
    return torch.device("cuda" if asked != "cpu" and available else "cpu")
