"""Finds the weight files of a model directory, and checks that they are whole. Imports no PyTorch.

Called by the checkpoint reader, which reads the tensors, and by `backends.refusals` before any process starts.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.quantization import DUMMY, SMOOTHQUANT_FILE

_SINGLES = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SAFETENSORS, _GGUF = ".safetensors", ".gguf"
_NAMES_SHOWN = 5


def weight_files(model_dir: Path) -> list[Path]:
    """Returns the single weight file, or the files listed in the index, or the parts of a GGUF file.

    If there are several formats, prefers safetensors, then `.bin`, then GGUF.
    """
    for single, index in zip(_SINGLES, _INDICES, strict=True):
        if (model_dir / single).is_file():
            return [model_dir / single]
        if (model_dir / index).is_file():
            return _indexed(model_dir, model_dir / index)
    files = sorted(model_dir.glob(f"*{_GGUF}"))
    if files:
        return files
    raise unusable(
        f"{model_dir} has neither {_SINGLES[0]} nor {_INDICES[0]}, nor the same as {_SINGLES[1]}, nor *{_GGUF}."
    )


def unusable(message: str) -> ServiceError:
    """Returns the error for weights that cannot be used."""
    return ServiceError("invalid_value", f"The model cannot be loaded: {message}", param="model")


def _indexed(model_dir: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise unusable(f"{index} is not an index of weight files.") from error
    unsafe = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if unsafe:
        raise unusable(f"{index} names files outside the model directory: {listed(unsafe)}.")
    lost = [name for name in names if not (model_dir / name).is_file()]
    if lost:
        raise unusable(f"{index} names files that are not there: {listed(lost)}.")
    return [model_dir / name for name in names]


def check_weight_files(model_dir: Path, *, smoothquant: bool) -> None:
    """Raises `ServiceError` if weight files are missing, or if a safetensors file is shorter than its header says.

    Files in other formats are checked when they are read; GGUF files were checked when they were converted.
    """
    for path in [model_dir / SMOOTHQUANT_FILE] if smoothquant else weight_files(model_dir):
        if path.suffix == _SAFETENSORS:
            # The library checks the header against the size of the file. NumPy is not imported for that.
            open_safetensors(path, "np")


def open_safetensors(path: Path, framework: str) -> Any:
    """Returns an open file of safetensors. Raises `ServiceError` if it cannot be read."""
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise unusable(f"{path} cannot be read as safetensors: {error}") from error


def check_format(asked: str, model_dir: Path) -> None:
    """Raises SettingsError if the weights have another format than `--load-format` asks for."""
    if asked in ("auto", DUMMY):
        return
    # GGUF files are read only if there are no other weights.
    others = [] if asked == "safetensors" else [*model_dir.glob("*.safetensors"), *model_dir.glob("pytorch_model*.bin")]
    if others or not any(model_dir.glob(f"*.{asked}")):
        raise SettingsError(f"--load-format={asked}: {model_dir} has no file of that kind; leave the option out")


def listed(names: list[str]) -> str:
    """Returns the first names of a list, and how many more there are, for a message."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(str, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
