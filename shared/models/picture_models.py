"""Which models take pictures, and what the settings about pictures may be. Read by the launcher and every service."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from shared.flags import SettingsError

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "llava", "llava_next")
"""The `model_type` in config.json of the models whose pictures are served."""
TEXT_ONLY = "--enable-mm: this model takes text only; pictures are served with Qwen2-VL, Qwen2.5-VL and LLaVA"


def check_takes_pictures(config: Mapping[str, Any]) -> None:
    """Raises SettingsError if the model of a config.json takes no pictures."""
    if config.get("model_type") not in MODEL_TYPES:
        raise SettingsError(TEXT_ONLY)


def check_picture_files(directory: Path) -> None:
    """Raises SettingsError unless a model takes pictures and has the files that an image service needs."""
    check_takes_pictures(read_model_fields(directory))
    processor_fields(directory)
    if not any(directory.glob("*.safetensors")):
        raise SettingsError(
            f"--enable-mm: {directory} has no *.safetensors, from which the weights of the vision encoder are read"
        )


def processor_fields(directory: Path) -> dict[str, Any]:
    """Returns the arguments of the image processor that come with a model. Raises SettingsError without them."""
    path = directory / "preprocessor_config.json"
    nested = not path.is_file()
    if nested:
        path = directory / "processor_config.json"
    try:
        found = json.loads(path.read_bytes())
        found = found.get("image_processor", {}) if nested else found
    except FileNotFoundError:
        raise SettingsError(
            f"--enable-mm: {directory} has no preprocessor_config.json, which says how pictures are read"
        ) from None
    except (ValueError, AttributeError) as error:
        raise SettingsError(f"--enable-mm: {path} is not a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"--enable-mm: {path} has no JSON object that says how pictures are read")
    return cast(dict[str, Any], found)


def read_model_fields(directory: Path) -> dict[str, Any]:
    """Returns the fields of a model's config.json; {} if there is none, as beside a GGUF file."""
    path = directory / "config.json"
    return json.loads(path.read_bytes()) if path.is_file() else {}


def processor_kwargs(text: str) -> dict[str, Any]:
    """Returns the arguments that `--mm-processor-kwargs` gives. Raises SettingsError if that is no JSON object."""
    try:
        value: Any = json.loads(text) if text else {}
    except ValueError as error:
        raise SettingsError(f"--mm-processor-kwargs: {text} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise SettingsError(f'--mm-processor-kwargs: {text} is not a JSON object such as {{"max_pixels": 501760}}')
    return cast(dict[str, Any], value)
