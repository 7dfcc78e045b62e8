"""Chooses the device and the backend for an engine's settings. Called by the engine's shells."""

import logging

import torch

from services.engine.cpu.worker import load_cpu_worker
from services.engine.worker.seam import ModelWorker
from services.engine.worker.torch_worker import TorchWorker
from shared.config import EngineSettings
from shared.errors import ServiceError
from shared.model_files import model_directory

logger = logging.getLogger(__name__)


def load_worker(settings: EngineSettings) -> ModelWorker:
    """A loaded worker. Raises `SettingsError` or `ServiceError` for settings or a model that cannot work."""
    model_dir, device = model_directory(settings), choose_device(settings.device)
    for notice in cpu_notices(settings) if device.type == "cpu" else ():
        logger.info("%s", notice)
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


def choose_device(asked: str) -> torch.device:
    """`auto` takes a CUDA device where there is one; asking for one that is not there is a `ServiceError`."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ServiceError("invalid_value", "--device cuda: no CUDA device is available here.", param="device")
    return torch.device("cuda" if asked != "cpu" and available else "cpu")
