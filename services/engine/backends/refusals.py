"""What an engine refuses by the small files of a model alone, without PyTorch.

The launcher checks this before it starts any process, so that a mistake is reported at once. The engine makes the same
checks with the same functions while it loads the model, and those that need the tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.services.engine.backends.torch.own_cache.kinds import keeps_own_cache
from antiphon.services.engine.backends.torch.whole_text.kinds import computes_whole
from antiphon.services.engine.models.config_fields import weight_dtype
from antiphon.services.engine.models.registry import find_family, has_family
from antiphon.services.engine.models.unknown import check_known
from antiphon.services.engine.worker.capacity.context import served_description
from antiphon.services.engine.worker.loading.model_files import read_config
from antiphon.services.engine.worker.loading.weight_files import check_format, check_weight_files
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.quantization import DUMMY


def check_model(settings: EngineSettings, model_dir: Path, *, smoothquant: bool) -> None:
    """Raises `ServiceError` or SettingsError if the files of a model or the settings about it cannot work.

    `smoothquant`: the weights are in `SMOOTHQUANT_FILE`.
    """
    check_format(settings.load_format, model_dir)
    config = read_config(model_dir)
    weight_dtype(config)
    check_drawn(settings, config)
    if settings.load_format == DUMMY:
        served_description(settings, config)
        return
    if not has_family(config):
        check_known(config, trusted=settings.trust_remote_code)
        check_weight_files(model_dir, smoothquant=smoothquant)
        return
    if computes_whole(config) or keeps_own_cache(config):
        check_weight_files(model_dir, smoothquant=smoothquant)
        return
    find_family(config).describe(config)  # an architecture that cannot be served is told before missing weights
    check_weight_files(model_dir, smoothquant=smoothquant)
    served_description(settings, config)


def check_drawn(settings: EngineSettings, config: Mapping[str, Any]) -> None:
    """Raises SettingsError if weights are to be drawn at random for a model whose tensors are not known here."""
    known = has_family(config) and not computes_whole(config) and not keeps_own_cache(config)
    if settings.load_format == DUMMY and not known:
        raise SettingsError(f"--load-format={DUMMY}: this architecture runs through transformers; leave the option out")


def no_cuda_device() -> ServiceError:
    """Returns the error for `--device cuda` on a machine without a GPU."""
    message = "--device cuda: no CUDA device is available here. Leave the option out, or ask `antiphon doctor` why."
    return ServiceError("invalid_value", message, param="device")
