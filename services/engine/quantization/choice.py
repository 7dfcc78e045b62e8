"""Selects the method that reads a model's weights and the quantizer that rounds them.

`antiphon.shared.settings.quantization` has the rules, which the launcher applies too. Called by the workers when they
load a model.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from antiphon.services.engine.quantization.formats import prepared
from antiphon.services.engine.quantization.method import PreparedMethod
from antiphon.services.engine.quantization.online import online_quantizer
from antiphon.services.engine.quantization.weight import Quantize
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.quantization import DUMMY, Device, Quantization, choose

logger = logging.getLogger(__name__)

_HOPPER = (9, 0)
_CPU = Device("a CPU")
_CPU_TORCH = Device("a CPU", multiplies_quantized=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """How the weights of a model are read. Without arguments: plain weights, loaded unchanged."""

    name: str = "none"
    """Its name in log lines and in the configuration's hash."""
    method: PreparedMethod | None = None
    quantize: Quantize | None = None
    is_smoothquant: bool = False
    """Whether the weights are in the file `SMOOTHQUANT_FILE`."""
    is_drawn: bool = False
    """Whether the weights are random numbers, and no files are read."""
    kv_scales: bool = False
    """Whether the checkpoint's scales of keys and values are folded into the weights, for a KV cache of 8 bits."""

    @property
    def is_plain(self) -> bool:
        """Whether all weights are loaded as plain tensors."""
        return self.method is None and self.quantize is None


PLAIN_WEIGHTS = WeightForm()


def weight_form(
    settings: EngineSettings, model_dir: Path, config: Mapping[str, Any], device: torch.device, *, native: bool
) -> WeightForm:
    """Returns the form for these settings. Raises SettingsError if settings, files and device contradict each other.

    `native`: whether the backend multiplies quantized weights without dequantizing them first.
    """
    able = _device(device, native)
    chosen = choose(settings.execution.quantization, model_dir, config, able)
    if settings.execution.quantization == "auto":
        because = "" if able.multiplies_quantized else ", PyTorch's operations do not multiply quantized weights"
        logger.info("quantization: auto: %s%s", chosen.name, because)
    if chosen != Quantization() and not native:
        logger.warning(
            "quantization: %s: this backend makes the weights plain again in each product: it saves memory, not time",
            chosen.name,
        )
    drawn = settings.load_format == DUMMY
    if drawn and chosen.method is not None:
        raise SettingsError(
            f"--load-format={DUMMY}: the weights are drawn unquantized; leave out the checkpoint's quantization"
        )
    name = f"{chosen.name} {DUMMY}" if drawn else chosen.name
    if chosen.online is not None:
        return WeightForm(name=name, quantize=online_quantizer(chosen.online), is_drawn=drawn)
    if chosen.method is not None:
        method = prepared(chosen.method, config)
        return WeightForm(name=chosen.name, method=method, is_smoothquant=chosen.method == "smoothquant")
    return WeightForm(name=name, is_drawn=True) if drawn else WeightForm()


def _device(device: torch.device, native: bool) -> Device:
    if device.type == "cpu":
        return _CPU if native else _CPU_TORCH
    able = torch.cuda.get_device_capability(device) >= _HOPPER and torch.version.hip is None
    return Device(torch.cuda.get_device_name(device), native, able, multiplies_w4a8=not native)
