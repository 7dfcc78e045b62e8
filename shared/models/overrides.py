"""Values of `--hf-overrides`, merged over a model's config.json.

The merged file is written into a private directory of this user, with links to all other files of the model. All code
that reads config.json, including transformers, is given that directory (`model_files.model_directory`), so that no
reader needs to know of the option. Hashes of config.json, such as those of packed weights and of
`system_fingerprint`, thus cover the values. The directory's name is a hash of the model's path, its file names, its
config.json and the values, so that all processes use the same one.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from antiphon.shared.cache_dirs import made_whole, models_cache
from antiphon.shared.flags import SettingsError
from antiphon.shared.settings.allowed_values import HF_OVERRIDES, overrides_of

_CACHE, _CONFIG = "~/.cache/antiphon/overrides", "config.json"
_KEPT = 64


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `config` with those of `overrides`. An object is merged into an object of the same name."""
    found = dict(config)
    for name, value in overrides.items():
        former = found.get(name)
        both = isinstance(former, Mapping) and isinstance(value, Mapping)
        found[name] = merged(cast(Any, former), cast(Any, value)) if both else value
    return found


def with_overrides(directory: Path, text: str) -> Path:
    """Returns a model directory whose config.json has the values of `--hf-overrides`; `directory` if there are none.

    A directory without config.json is returned unchanged; code that needs the file reports the error. Raises
    SettingsError if the value or the file is not a JSON object, or if no directory can be written.
    """
    overrides = overrides_of(text)
    if overrides is None:
        raise SettingsError(f"--hf-overrides: {text} is not {HF_OVERRIDES.text}")
    path = directory / _CONFIG
    if not overrides or not path.is_file():
        return directory
    try:
        content = json.dumps(merged(_read(path), overrides), ensure_ascii=False, sort_keys=True)
        made = models_cache(_CACHE, "overrides") / _key(directory, content)
        if not (made / _CONFIG).is_file():
            _make(made, directory, content)
        os.utime(made)
    except OSError as error:
        raise SettingsError(f"--hf-overrides: {path} cannot be combined with the values: {error}") from error
    return made


def _read(path: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads(path.read_bytes())
    except ValueError as error:
        raise SettingsError(f"--model: {path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SettingsError(f"--model: {path} must hold a JSON object")
    return cast(dict[str, Any], value)


def _key(directory: Path, content: str) -> str:
    names = "\0".join(sorted(path.name for path in directory.iterdir()))
    return hashlib.sha256(f"{directory}\0{names}\0{content}".encode()).hexdigest()[:32]


def _make(made: Path, directory: Path, content: str) -> None:
    with made_whole(made, _CONFIG, _KEPT) as scratch:
        for path in directory.iterdir():
            if path.name != _CONFIG:
                (scratch / path.name).symlink_to(path)
        (scratch / _CONFIG).write_text(content, encoding="utf-8")
