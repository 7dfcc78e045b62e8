"""Chooses the device and the worker for an engine's settings, and loads the worker. Called by the engine."""

import importlib.util
import logging
from pathlib import Path

import torch

from antiphon.services.engine.backends.cpu.worker import load_cpu_worker
from antiphon.services.engine.backends.refusals import check_drawn, no_cuda_device
from antiphon.services.engine.backends.torch.own_cache.kinds import keeps_own_cache
from antiphon.services.engine.backends.torch.staged_worker import StagedWorker
from antiphon.services.engine.backends.torch.whole_text.kinds import computes_whole
from antiphon.services.engine.backends.torch.worker import TorchWorker
from antiphon.services.engine.models.registry import has_family
from antiphon.services.engine.parallel.communicator import ALONE_RANK, Communicator
from antiphon.services.engine.worker.capacity.context import longer_context_notice
from antiphon.services.engine.worker.capacity.memory_advice import measures
from antiphon.services.engine.worker.interface import ModelWorker
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.services.engine.worker.loading.weight_files import check_format
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.model_files import model_directory
from antiphon.shared.observability import resources

logger = logging.getLogger(__name__)

_OLDEST, _OLDEST_WITH_FLOAT8 = (8, 0), (8, 9)


def load_worker(settings: EngineSettings, ranks: Communicator = ALONE_RANK) -> ModelWorker:
    """Returns a loaded worker, or the worker of one of several ranks.

    Raises `SettingsError` or `ServiceError` for settings or a model that cannot work.
    """
    model_dir, device = model_directory(settings), choose_device(settings.execution.device)
    check_format(settings.load_format, model_dir)
    if device.type == "cuda" and ranks.shard.size == 1:
        resources.add_gpu(torch.cuda, device.index)
    try:
        return _load(settings, model_dir, device, ranks)
    except torch.OutOfMemoryError as error:
        reason, on_cpu = str(error).split(". ")[0], device.type == "cpu"
        raise ServiceError(
            "invalid_value",
            f"The model does not fit into the memory of the device ({reason}). {measures(settings, on_cpu=on_cpu)}",
            param="model",
        ) from error


def _load(settings: EngineSettings, model_dir: Path, device: torch.device, ranks: Communicator) -> ModelWorker:
    config = read_config(model_dir)
    check_drawn(settings, config)
    if computes_whole(config):
        if ranks.shard.size > 1:
            raise SettingsError(
                "--tensor-parallel-size, --pipeline-parallel-size: encoders and classifiers run on one device"
            )
        # Imported here because importing transformers takes seconds, and most models do not need it.
        from antiphon.services.engine.backends.torch.whole_text.worker import WholeTextWorker

        return WholeTextWorker(settings, model_dir, device)
    if keeps_own_cache(config):
        if ranks.shard.size > 1:
            raise SettingsError(
                "--tensor-parallel-size, --pipeline-parallel-size: this architecture runs through transformers with a "
                "cache of its own, on one device; leave the option out"
            )
        # Imported here because importing transformers takes seconds, and most models do not need it.
        from antiphon.services.engine.backends.torch.own_cache.worker import OwnCacheWorker

        return OwnCacheWorker(settings, model_dir, device)
    if has_family(config) and ranks.shard.rank == 0 and (notice := longer_context_notice(settings, config)):
        logger.info("%s", notice)
    if ranks.shard.size > 1:
        return _load_rank(settings, model_dir, device, ranks)
    for notice in cpu_notices(settings) if device.type == "cpu" else ():
        logger.info("%s", notice)
    if uses_triton(settings, device, model_dir):
        # Imported here because Triton is not needed on a CPU.
        from antiphon.services.engine.backends.triton.worker import TritonWorker

        return TritonWorker(settings, model_dir, device)
    if device.type == "cpu" and settings.execution.cpu_backend != "torch":
        worker = load_cpu_worker(settings, model_dir)
        if worker is not None:
            return worker
    return TorchWorker(settings, model_dir, device)


def _load_rank(settings: EngineSettings, model_dir: Path, device: torch.device, ranks: Communicator) -> ModelWorker:
    """Returns the worker of a rank. On a machine with GPUs, it uses the GPU with the rank's number on this machine."""
    if device.type == "cuda":
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
        resources.add_gpu(torch.cuda, device.index)
    if ranks.stage is None and uses_triton(settings, device, model_dir):
        from antiphon.services.engine.backends.triton.worker import TritonWorker

        return TritonWorker(settings, model_dir, device, ranks)
    if ranks.shard.rank == 0:
        logger.info("PyTorch's operations compute: other backends do not divide a model in this way")
    return (TorchWorker if ranks.stage is None else StagedWorker)(settings, model_dir, device, ranks)


def cpu_notices(settings: EngineSettings) -> list[str]:
    """Returns a notice for each given option that has no effect on a CPU, which has no CUDA graphs."""
    asked = {
        "--enforce-eager": settings.execution.enforce_eager,
        "--max-seq-len-to-capture": settings.execution.max_seq_len_to_capture
        != EngineSettings().execution.max_seq_len_to_capture,
    }
    return [f"{flag} changes nothing on a CPU: every step runs without CUDA graphs" for flag in asked if asked[flag]]


def uses_triton(settings: EngineSettings, device: torch.device, model_dir: Path) -> bool:
    """Whether the Triton worker is used. Raises `SettingsError` if it is asked for on a CPU without the interpreter.

    PyTorch's operations are used for a model without a description, and for a device or cache type that the kernels do
    not support.
    """
    if device.type == "cpu":
        if settings.execution.cpu_backend != "triton":
            return False
        if has_family(read_config(model_dir)) and (reason := triton_cannot_serve(settings, model_dir)) is not None:
            raise SettingsError(f"--cpu-backend=triton: {reason}; leave it out")
        if not _interprets():
            raise SettingsError("--cpu-backend=triton is for tests: it needs TRITON_INTERPRET=1 in the environment")
        logger.warning("the GPU kernels run under Triton's interpreter: very slowly, for tests")
        return True
    if settings.execution.cuda_backend != "auto":
        return False
    reason = _reason_for_torch(settings, device, model_dir)
    if reason is not None:
        logger.warning("the Triton kernels are not used: %s. PyTorch's operations compute instead", reason)
    return reason is None


def triton_cannot_serve(settings: EngineSettings, model_dir: Path) -> str | None:
    """Returns the reason why the Triton worker cannot run this model with these settings; None if it can."""
    if not has_family(read_config(model_dir)):
        return "this architecture runs through transformers"
    return None


def _reason_for_torch(settings: EngineSettings, device: torch.device, model_dir: Path) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if (reason := triton_cannot_serve(settings, model_dir)) is not None:
        return reason
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < _OLDEST:
        return "they need a device of compute capability 8.0 or newer"
    if settings.cache.kv_cache_dtype != "auto" and torch.cuda.get_device_capability(device) < _OLDEST_WITH_FLOAT8:
        return f"--kv-cache-dtype {settings.cache.kv_cache_dtype} needs compute capability 8.9 or newer there"
    return None


def _interprets() -> bool:
    """Whether Triton runs kernels in its interpreter. The setting is read when Triton is imported."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]


def choose_device(asked: str) -> torch.device:
    """Returns the device. `auto` means CUDA if it is available; `cuda` raises `ServiceError` if it is not.

    A CUDA device always has a number, because some functions of PyTorch need one.
    """
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise no_cuda_device()
    return torch.device("cuda", torch.cuda.current_device()) if asked != "cpu" and available else torch.device("cpu")
