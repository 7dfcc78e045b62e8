"""Lists the models that support images, and checks the settings about images.

Used by the launcher and every service.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from antiphon.shared import limits
from antiphon.shared.flags import SettingsError

MODEL_TYPES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3",
    "gemma4",
    "glm4v",
    "glm46v",
    "glm4v_moe",
    "idefics3",
    "smolvlm",
    "internvl",
    "mistral3",
    "llava",
    "llava_next",
    "llava_onevision",
)
"""The `model_type` in config.json of the models whose images are served."""
TEXT_ONLY = (
    "--enable-mm: this model takes text only; images are served with Gemma 3 and 4, GLM-4.1V, GLM-4.5V, "
    "GLM-4.6V, Idefics 3, InternVL 3, LLaVA, Mistral Small 3.1, Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen 3.5 and SmolVLM"
)


def check_takes_images(config: Mapping[str, Any]) -> None:
    """Raises SettingsError if the model of a config.json does not support images."""
    if config.get("model_type") not in MODEL_TYPES:
        raise SettingsError(TEXT_ONLY)


def check_image_files(directory: Path) -> None:
    """Raises SettingsError unless a model supports images and has the files that an image service needs."""
    check_takes_images(read_model_fields(directory))
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
            f"--enable-mm: {directory} has no preprocessor_config.json, which says how images are read"
        ) from None
    except (ValueError, AttributeError) as error:
        raise SettingsError(f"--enable-mm: {path} is not a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise SettingsError(f"--enable-mm: {path} has no JSON object that says how images are read")
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


def image_limit(given: str, name: str = "--limit-mm-per-prompt") -> int:
    """Returns the maximum number of images per request, from `image=N` or a JSON object; default `limits.IMAGES_MAX`.

    Raises SettingsError that calls the setting `name`, also for a number of videos or audio files above 0.
    """
    fields = _counts(given)
    for kind, count in fields.items():
        most = limits.IMAGES_MAX if kind == "image" else 0
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= most:
            raise SettingsError(
                f'{name}: {given} is neither image=N nor JSON such as {{"image": N}}, with at most {limits.IMAGES_MAX} '
                "images; there are neither videos nor audio"
            )
    return fields.get("image", limits.IMAGES_MAX)


def _counts(given: str) -> dict[str, Any]:
    """Returns the numbers by kind; {"": None} if it has neither of the two forms."""
    if given in ("", "none"):
        return {}
    words = [word.partition("=") for word in given.split(",")]
    if all(kind and count.isdecimal() for kind, _, count in words):
        return {kind.strip(): int(count) for kind, _, count in words}
    try:
        value: Any = json.loads(given)
    except ValueError:
        value = None
    return cast(dict[str, Any], value) if isinstance(value, dict) else {"": None}
