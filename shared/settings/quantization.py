"""The rules of `--quantization`: determines the form of the weights from the setting, the model's files and the device.

Contains no tensors: `services/engine/quantization` reads and creates the weights. Called by the launcher before it
starts any process, and by the engine when it loads a model, so that both give the same answer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from antiphon.shared.flags import SettingsError

DUMMY = "dummy"
"""The `--load-format` with which weights are drawn at random and no files are read."""
SMOOTHQUANT_FILE = "smoothq_model-8bit-auto.safetensors"
"""File with all weights of a model in 8 bits, for matrix products with 8-bit activations. It replaces all other files
of weights."""
NAMES = (
    "none",
    "None",
    "auto",
    "ifq",
    "ifq_w8a8",
    "ifq_w4a8",
    "ifq_nf4",
    "fp8",
    "weight_only_int8",
    "smoothquant",
    "smooth_quant",
    "awq",
    "gptq",
    "gpt",
    "compressed-tensors",
    "bitsandbytes",
    "gguf",
)
"""The values of `--quantization`. `None` is the same as leaving it out; `none` means weights as stored."""
OnlineMode = Literal["ifq", "ifq_w8a8", "ifq_w4a8", "ifq_nf4", "fp8"]
ROUNDS_ROWS: tuple[OnlineMode, ...] = ("ifq_w8a8", "ifq_w4a8")
"""The modes that round the rows of matrix products to 8 bits."""
Method = Literal["awq", "gptq", "compressed-tensors", "bitsandbytes", "fp8", "mxfp4", "gguf", "smoothquant"]
METHODS: tuple[Method, ...] = ("awq", "gptq", "compressed-tensors", "bitsandbytes", "fp8", "mxfp4", "gguf")
"""The methods that `quantization_config` of a config.json may name; `gguf` stands for a file of that kind."""
_SAME = {"gpt": "gptq", "smooth_quant": "smoothquant"}
_ONLINE: dict[str, OnlineMode] = {
    "ifq": "ifq",
    "ifq_w8a8": "ifq_w8a8",
    "ifq_w4a8": "ifq_w4a8",
    "ifq_nf4": "ifq_nf4",
    "fp8": "fp8",
    "weight_only_int8": "ifq",
}
_WHILE_LOADING = "ifq, ifq_w8a8, ifq_w4a8 or ifq_nf4"
_MAKE_IT = "make it: antiphon quantize -quant_type"


@dataclass(frozen=True, slots=True)
class Device:
    """Which matrix products with quantized weights a device supports."""

    name: str
    """Name of the device in messages, such as `a CPU`."""
    multiplies_quantized: bool = True
    """Whether the device multiplies quantized weights natively. If not, `--quantization auto` quantizes no plain
    weights.
    """
    multiplies_fp8: bool = False
    multiplies_w4a8: bool = True
    """Whether weights of 4 bits can be multiplied with rows of 8 bits."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a model are stored on the device.

    `method` is the method of a quantized checkpoint, `online` the quantization of plain weights while loading. At most
    one of them is set; without either, weights are used as stored.
    """

    method: Method | None = None
    online: OnlineMode | None = None

    @property
    def name(self) -> str:
        """Its name in log lines."""
        return self.method or self.online or "none"


def choose(asked: str, model_dir: Path, config: Mapping[str, Any], device: Device) -> Quantization:
    """Returns the form of a model's weights. Raises SettingsError if setting, files and device contradict each other.

    `asked` is the value of `--quantization`, or empty. `config` is the content of config.json.
    """
    asked = "" if asked == "None" else _SAME.get(asked, asked)
    prepared, smooth = prepared_method(config), (model_dir / SMOOTHQUANT_FILE).is_file()
    if asked == "auto":
        return _automatic(prepared, smooth, smooth and _is_w8a8(config), device)
    if asked == "smoothquant":
        return _smoothquant(model_dir, config, prepared, smooth)
    if prepared is not None:
        return _prepared(asked, prepared, smooth and _is_w8a8(config))
    if asked == "" and smooth and not _has_plain_weights(model_dir):
        return Quantization(method="smoothquant")
    if asked in ("", "none"):
        return Quantization()
    if asked == "fp8" and not device.multiplies_fp8:
        raise SettingsError(
            "--quantization: fp8 needs an NVIDIA GPU of compute capability 9.0 (Hopper) or newer; "
            f"this machine computes on {device.name}; use {_WHILE_LOADING}"
        )
    if asked == "ifq_w4a8" and not device.multiplies_w4a8:
        raise SettingsError(
            "--quantization: ifq_w4a8 is for CPUs; "
            f"this machine computes on {device.name}; use ifq_nf4, which rounds the weights alike"
        )
    if asked in _ONLINE:
        return Quantization(online=_ONLINE[asked])
    made = f"; {_MAKE_IT} {asked}" if asked in ("awq", "gptq") else ""
    raise SettingsError(
        f"--quantization: {model_dir} is not a checkpoint prepared with {asked}: its config.json has no "
        f"quantization_config{made}, or use {_WHILE_LOADING}, which quantize while loading"
    )


def prepared_method(config: Mapping[str, Any]) -> Method | None:
    """Returns the method that a config.json names in `quantization_config`; None if its weights are plain.

    Raises SettingsError for a method that is not supported.
    """
    settings = quantization_settings(config)
    if not settings:
        return None
    name = str(settings.get("quant_method", "")).lower()
    for method in METHODS:
        if name == method:
            return method
    raise SettingsError(
        f"--model: config.json has quantization_config for {name or 'no method'!s}; weights of {', '.join(METHODS)} "
        "are served"
    )


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `quantization_config` of a config.json, {} if it has none."""
    return _object(config.get("quantization_config") or config.get("compression_config"))


def read_model_config(model_dir: Path) -> dict[str, Any]:
    """Returns the content of config.json, {} if it cannot be read: the engine then reports the error."""
    try:
        value = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _automatic(prepared: Method | None, smooth: bool, is_smooth: bool, device: Device) -> Quantization:
    if prepared is not None:
        return Quantization(method="smoothquant" if is_smooth else prepared)
    if not device.multiplies_quantized:
        return Quantization()
    return Quantization(method="smoothquant") if smooth else Quantization(online="ifq")


def _smoothquant(model_dir: Path, config: Mapping[str, Any], prepared: Method | None, smooth: bool) -> Quantization:
    if prepared is not None and not (prepared == "compressed-tensors" and _is_w8a8(config)):
        raise _conflict("smoothquant", prepared)
    if smooth:
        return Quantization(method="smoothquant")
    raise SettingsError(
        f"--quantization: {SMOOTHQUANT_FILE} is not in {model_dir}; {_MAKE_IT} smooth_quant -i {model_dir} …"
    )


def _prepared(asked: str, prepared: Method, is_smooth: bool) -> Quantization:
    same = asked in ("", prepared) or (asked == "weight_only_int8" and prepared == "compressed-tensors")
    if not same:
        raise _conflict(asked, prepared)
    return Quantization(method="smoothquant" if is_smooth else prepared)


def _conflict(asked: str, prepared: Method) -> SettingsError:
    return SettingsError(
        f"--quantization: {asked} contradicts the model, whose weights are prepared with {prepared} "
        "(quantization_config in its config.json). Leave the option out"
    )


def _is_w8a8(config: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors config has 8-bit integer activations."""
    groups = _object(quantization_settings(config).get("config_groups")).values()
    rows = [_object(_object(group).get("input_activations")) for group in groups]
    return bool(rows) and all(row.get("num_bits") == 8 and row.get("type", "int") == "int" for row in rows)


def _object(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _has_plain_weights(model_dir: Path) -> bool:
    names = ("model.safetensors", "pytorch_model.bin")
    return any((model_dir / f"{name}{end}").is_file() for name in names for end in ("", ".index.json"))
