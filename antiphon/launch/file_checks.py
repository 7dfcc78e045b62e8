"""Checks of a model's files, and of the settings that they contradict, before the launcher starts any process.

The checks are the engine's own (`antiphon.services.engine.backends.refusals`), as far as they need no tensors. The
engine's modules are imported when a model is checked, so that other commands start without them; none imports PyTorch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.launch import devices
from antiphon.settings import ServeSettings
from antiphon.shared.config import EngineSettings
from antiphon.shared.distributed import world
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError, converted
from antiphon.shared.models.image_models import check_image_files
from antiphon.shared.models.model_files import model_directory
from antiphon.shared.settings.quantization import Device, Quantization, choose, read_model_config


def check_files(model: ServeSettings, environ: Mapping[str, str], device_files: Path = devices.DEVICE_FILES) -> None:
    """Raises SettingsError if a model's files are not usable, or the settings about it contradict them or the machine.

    `device_files`: the directory where GPUs have files.
    """
    directory = model_directory(model, weights=False)
    try:
        _check_device(model.execution.device, environ, device_files)
        quantization = _check_settings(model, directory, environ)
        from antiphon.services.engine.backends.refusals import check_model

        own = converted(model, EngineSettings)
        check_model(own, directory, smoothquant=quantization.method == "smoothquant")
    except ServiceError as error:
        raise SettingsError(error.message) from error


def _check_device(device: str, environ: Mapping[str, str], device_files: Path) -> None:
    if device != "cuda" or devices.may_have_gpus(environ, device_files):
        return
    from antiphon.services.engine.backends.refusals import no_cuda_device

    raise no_cuda_device()


def _check_settings(model: ServeSettings, directory: Path, environ: Mapping[str, str]) -> Quantization:
    """Returns the form of the weights.

    Raises SettingsError if `--enable-mm`, `--quantization` or a number of devices does not fit the files or the CPU. On
    a GPU the engine checks quantization itself.
    """
    if model.enable_mm:
        check_image_files(directory)
    on_cpu = devices.on_cpu(model.execution.device, environ)
    cpu = Device("a CPU", model.execution.cpu_backend == "auto")
    gpu = Device("a GPU", multiplies_fp8=True, multiplies_w4a8=False)
    config = read_model_config(directory)
    quantization = choose(model.execution.quantization, directory, config, cpu if on_cpu else gpu)
    if world.world_size(model.parallel) > 1:
        _check_division(model, config)
    return quantization


def _check_division(model: ServeSettings, config: dict[str, Any]) -> None:
    """Raises SettingsError if the model has too few layers or heads for the devices of an engine.

    The engine checks the rest, and the models whose config.json has other names.
    """
    sizes = {**config, **(config.get("text_config") or {})}
    heads, layers = sizes.get("num_attention_heads"), sizes.get("num_hidden_layers")
    if isinstance(heads, int) and isinstance(layers, int):
        tp, pp = model.parallel.tensor_parallel_size, model.parallel.pipeline_parallel_size
        world.check_division(tp, {"attention heads": heads}, pp, layers)
