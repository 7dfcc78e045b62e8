"""Chooses the device and the backend for an engine's settings. Called by the engine's shells."""

import torch

from services.engine.cpu.worker import load_cpu_worker
from services.engine.worker.seam import ModelWorker
from services.engine.worker.torch_worker import TorchWorker
from shared.config import EngineSettings
from shared.errors import ServiceError
from shared.model_files import model_directory


def load_worker(settings: EngineSettings) -> ModelWorker:
    """A loaded worker. Raises `SettingsError` or `ServiceError` for settings or a model that cannot work."""
    model_dir, device = model_directory(settings), choose_device(settings.device)
    if device.type == "cpu" and settings.cpu_backend != "torch":
        worker = load_cpu_worker(settings, model_dir)
        if worker is not None:
            return worker
    return TorchWorker(settings, model_dir, device)


def choose_device(asked: str) -> torch.device:
    """`auto` takes a CUDA device where there is one; asking for one that is not there is a `ServiceError`."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ServiceError("invalid_value", "--device cuda: no CUDA device is available here.", param="device")
    return torch.device("cuda" if asked != "cpu" and available else "cpu")
