"""Chooses the model directory, the device and the backend for an engine's settings. Called by the engine's shells."""

from pathlib import Path

import torch

from services.engine.worker.seam import ModelWorker
from services.engine.worker.torch_worker import TorchWorker
from shared.config import EngineSettings
from shared.errors import ServiceError

_DEMO_MODEL = Path(__file__).resolve().parents[3] / "antiphon" / "demo"
"""Beside the services both in a checkout and in an installed package."""


def load_worker(settings: EngineSettings) -> ModelWorker:
    """A loaded worker. Raises `ServiceError` for settings or a model that cannot work."""
    return TorchWorker(settings, model_directory(settings), choose_device(settings.device))


def model_directory(settings: EngineSettings) -> Path:
    """The directory that the settings name, or the demo model's."""
    directory = Path(settings.model) if settings.model else _DEMO_MODEL
    if not directory.is_dir():
        raise ServiceError("invalid_value", f"--model: {directory} is not a directory.", param="model")
    return directory


def choose_device(asked: str) -> torch.device:
    """`auto` takes a CUDA device where there is one; asking for one that is not there is a `ServiceError`."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ServiceError("invalid_value", "--device cuda: no CUDA device is available here.", param="device")
    return torch.device("cuda" if asked != "cpu" and available else "cpu")
