"""The directories and names of a model, from the settings of a service.

The setting `--model` is a directory or a name on the Hugging Face hub. A launcher looks hub names up once (`located`)
and passes directories to its services, so that all of them use the same files even if the hub's files change. A service
that is started alone looks its model up itself.
"""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from shared import hub
from shared.config import ModelSettings, SettingsError

M = TypeVar("M", bound=ModelSettings)
DEMO_DIRECTORY = Path(__file__).resolve().parent.parent / "antiphon" / "demo"
DEMO_NAME = "antiphon-demo"


def model_directory(settings: ModelSettings, *, weights: bool = True) -> Path:
    """Returns the model's directory, downloaded if needed. Raises SettingsError if the model is not found.

    Without `weights`, only files other than the weights are downloaded.
    """
    if not settings.model:
        return DEMO_DIRECTORY
    return _find(settings, settings.model, settings.revision, "--model", weights=weights)


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
    """Returns the model's name in requests: the served name, else the name or path as given, else the demo's name."""
    return settings.served_model_name or settings.model or DEMO_NAME


def model_aliases(settings: ModelSettings) -> tuple[str, ...]:
    """Returns further names of the model that requests may use."""
    names = (name.strip() for name in settings.served_model_alias.split(","))
    return tuple(name for name in names if name)


def located(settings: M) -> M:
    """Returns the settings with hub names replaced by directories. Raises SettingsError if a model is not found."""
    changes: dict[str, str] = {}
    model = model_directory(settings)
    if settings.model and not _path(settings.model).is_dir():
        changes = {"model": str(model), "revision": "", "served_model_name": model_name(settings)}
    if settings.tokenizer or settings.tokenizer_revision:
        changes |= {"tokenizer": str(tokenizer_directory(settings)), "tokenizer_revision": ""}
    return replace(settings, **changes)


def _find(settings: ModelSettings, given: str, revision: str, flag: str, *, weights: bool) -> Path:
    path = _path(given)
    if path.is_dir():
        return path.resolve()
    if hub.is_name(given):
        return hub.find_snapshot(given, revision, flag, weights=weights, cache=settings.download_dir)
    raise SettingsError(f"{flag}: there is no directory {path}. Give the path of a model in Hugging Face layout.")


def _path(given: str) -> Path:
    return Path(given).expanduser()
