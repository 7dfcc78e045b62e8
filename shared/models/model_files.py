"""The directories and names of a model, from the settings of a service.

The setting `--model` is a directory, a GGUF file or a name on the Hugging Face hub. A launcher looks hub names up once
(`located`) and passes directories to its services, so that all of them use the same files even if the hub's files
change. A service that is started alone looks its model up itself.

A GGUF file, alone or in a directory without other weights, becomes a model directory in the user's cache
(`antiphon.shared.models.gguf_model`).

A model's directory may have a file `ti_model_config.json` with the model's name and the name of its conversation
template. `described` uses these values where the settings have none.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from antiphon.shared.config import ModelSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.models import hub
from antiphon.shared.models.gguf_model.names import stem_of
from antiphon.shared.models.overrides import with_overrides
from antiphon.shared.settings.allowed_values import CONV_TEMPLATE, MODEL_NAME

M = TypeVar("M", bound=ModelSettings)
DEMO_DIRECTORY = Path(__file__).absolute().parents[2] / "demo"
DEMO_NAME = "antiphon-demo"
_GGUF = ".gguf"
MODEL_CONFIG = "ti_model_config.json"
_OF_A_MODEL = ("config.json", MODEL_CONFIG, "tokenizer*.json", "*.safetensors", "*.bin")
"""Patterns of files, one of which is in every directory that is meant as a model, even if others are missing."""
UNPUBLISHED_TEMPLATE = "shennong_chat"
"""The conversation template whose layout is not public: it can be named, but only used as a `--chat-template`."""


def model_directory(settings: ModelSettings, *, weights: bool = True) -> Path:
    """Returns the model's directory, downloaded if needed. Raises SettingsError if the model is not found.

    Without `weights`, only files other than the weights are downloaded. With `--hf-overrides` the directory is one
    whose config.json has these values (`antiphon.shared.models.overrides`).
    """
    return with_overrides(_own_directory(settings, weights=weights), settings.hf_overrides)


def _own_directory(settings: ModelSettings, *, weights: bool) -> Path:
    """Returns the model's original directory, without the values of `--hf-overrides`."""
    if not settings.model:
        return DEMO_DIRECTORY
    has_other = bool(settings.tokenizer or settings.tokenizer_extension_path or settings.skip_tokenizer_init)
    return _find(settings, settings.model, settings.revision, "--model", weights=weights, tokenizer=not has_other)


def tokenizer_directory(settings: ModelSettings) -> Path:
    """Returns the tokenizer's directory: the model's, unless the settings name another tokenizer or revision.

    Raises SettingsError if it is not found.
    """
    if settings.tokenizer:
        return _find(settings, settings.tokenizer, settings.tokenizer_revision, "--tokenizer", weights=False)
    if settings.tokenizer_revision and settings.model:
        return _find(settings, settings.model, settings.tokenizer_revision, "--tokenizer-revision", weights=False)
    return model_directory(settings, weights=False)


def model_name(settings: ModelSettings) -> str:
    """Returns the model's name in requests.

    It is the served name, else the model id, else the name that follows from the path or hub name as given, else the
    demo's name.
    """
    return settings.served_model_name or settings.model_id or short_name(given_model(settings)) or DEMO_NAME


def given_model(settings: ModelSettings) -> str:
    """Returns the path or hub name as the user gave it, also if a launcher has looked it up; '' for the demo model."""
    return settings.given_model or settings.model


def short_name(given: str) -> str:
    """Returns the name of a model that has no other: a directory's last part, a GGUF file's stem, or the hub name."""
    path = _path(given)
    if not given or (not path.exists() and hub.is_name(given)):
        return given
    name = path.name if path.name not in ("", "..") else path.resolve().name
    return stem_of(name) if name.endswith(_GGUF) and not path.is_dir() else name or given


def model_aliases(settings: ModelSettings) -> tuple[str, ...]:
    """Returns further names of the model that requests may use.

    The whole path is one of them if the model's name is a part of it.
    """
    name, given = model_name(settings), given_model(settings)
    names = [alias.strip() for alias in settings.served_model_alias.split(",")]
    if name == short_name(given):
        names.append(given)
    return tuple(dict.fromkeys(alias for alias in names if alias and alias != name))


def described(settings: M) -> M:
    """Returns the settings with the model id and the conversation template of the model's `ti_model_config.json`.

    Settings that are already set do not change. A name on the hub has no directory yet: see `located`. Raises
    SettingsError for a file that cannot be read, for a template that is not known, and for one that cannot be used.
    """
    path = _path(settings.model) / MODEL_CONFIG if settings.model else DEMO_DIRECTORY / MODEL_CONFIG
    source, config = "--conv-template (CONV_TEMPLATE)", _model_config(path) if path.is_file() else {}
    model_id = settings.model_id or _text(config, "model_id", path)
    if not MODEL_NAME.holds(model_id):
        raise SettingsError(f"{path}: 'model_id' is not {MODEL_NAME.text}")
    template = settings.conv_template
    if not template:
        source, template = f"{path}: conv_template_name", _text(config, "conv_template_name", path)
    if not CONV_TEMPLATE.holds(template):
        raise SettingsError(f"{source}: {template} is not {CONV_TEMPLATE.text}")
    if template == UNPUBLISHED_TEMPLATE and not settings.chat_template:
        raise SettingsError(f"{source}: the layout of {template} is not public: give it with --chat-template")
    return replace(settings, model_id=model_id, conv_template=template or None)


def located(settings: M, *, weights: bool = True) -> M:
    """Returns the settings with hub names and GGUF files replaced by directories, and `described`.

    Without `weights`, only files other than the weights are downloaded. The setting `hf_overrides` is kept, so that
    each process applies it to its directory. Raises SettingsError if a model is not found.
    """
    changes: dict[str, str] = {}
    model = _own_directory(settings, weights=weights)
    if weights and settings.model and not any(any(model.glob(pattern)) for pattern in _OF_A_MODEL):
        raise SettingsError(f"--model: {model} has no model: neither a config.json nor a file *{_GGUF}.")
    if settings.model and model != _path(settings.model).resolve():
        changes = {"model": str(model), "revision": "", "served_model_name": model_name(settings)}
        changes["given_model"] = given_model(settings)
    if settings.tokenizer or settings.tokenizer_revision:
        changes |= {"tokenizer": str(tokenizer_directory(settings)), "tokenizer_revision": ""}
    return described(replace(settings, **changes))


def _model_config(path: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{path} must hold a JSON object with 'model_id' and 'conv_template_name'")
    return cast(dict[str, Any], value)


def _text(config: dict[str, Any], name: str, path: Path) -> str:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise SettingsError(f"{path}: {name} must be a text, not {value!r}")
    return value or ""


def _find(
    settings: ModelSettings, given: str, revision: str, flag: str, *, weights: bool, tokenizer: bool = True
) -> Path:
    path = _path(given)
    if path.is_dir():
        return _with_files(path.resolve(), flag, tokenizer)
    if path.is_file():
        return _of_file(path, flag, tokenizer)
    if given == DEMO_NAME:
        raise SettingsError(f"{flag}: there is no directory {given}. To serve the demo model, leave {flag} out.")
    if hub.is_name(given):
        found = hub.find_snapshot(given, revision, flag, weights=weights, cache=settings.download_dir)
        return _of_file(found, flag, tokenizer) if found.suffix == _GGUF else found
    raise SettingsError(
        f"{flag}: there is no directory {path}. Give the path of a model in Hugging Face layout, or of a GGUF file."
    )


def _with_files(directory: Path, flag: str, tokenizer: bool) -> Path:
    """Returns a directory. If its weights are a GGUF file, returns the directory converted from that file."""
    if not any(directory.glob(f"*{_GGUF}")):
        return directory
    # Imported here because the package gguf and numpy are needed for such files only.
    from antiphon.shared.models.gguf_model.directory import gguf_file, model_of_file

    file = gguf_file(directory)
    return directory if file is None else model_of_file(file, flag, tokenizer=tokenizer, beside=directory)


def _of_file(path: Path, flag: str, tokenizer: bool) -> Path:
    if path.suffix != _GGUF:
        raise SettingsError(f"{flag}: {path} is a file; give the path of a directory, or of a file *{_GGUF}")
    from antiphon.shared.models.gguf_model.directory import model_of_file

    return model_of_file(path, flag, tokenizer=tokenizer)


def _path(given: str) -> Path:
    return Path(given).expanduser()
