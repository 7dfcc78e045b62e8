"""Stores converted GGUF models in private directories: a model directory for each file, with links to the file.

A directory's name is a hash of the file's path, size, time and first bytes, which hold the metadata, so that a file is
converted once. Files such as config.json or tokenizer.json that are next to the GGUF file replace the converted ones.
Called by `antiphon.shared.models.model_files`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from antiphon.shared.cache_dirs import made_whole, models_cache
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.gguf_model.config import generation_config, model_config
from antiphon.shared.models.gguf_model.names import SUFFIX
from antiphon.shared.models.gguf_model.reader import GgufError, GgufModel, part_paths
from antiphon.shared.models.gguf_model.tokenizer import tokenizer_documents

_CACHE = "~/.cache/antiphon/gguf"
_FORMAT = "1"
"""Version of the converted files; changed whenever the conversion changes."""
_KEPT = 64
_HEAD_BYTES = 16 * 2**20
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_MORE = ("special_tokens_map.json", "chat_template.jinja", "chat_template.json", "ti_model_config.json")
_MADE = ".made-from-gguf"
"""Name of an empty file that marks converted directories."""


def gguf_file(directory: Path) -> Path | None:
    """Returns the GGUF file of a directory; None if the directory has weights in another format.

    If a model is stored in several files, returns the first one. Returns None if there is no GGUF file, or if the
    directory was itself made from one. Raises SettingsError if there are several models.
    """
    files = sorted(path for path in directory.glob(f"*{SUFFIX}") if path.is_file())
    if (
        not files
        or (directory / _MADE).exists()
        or any(directory.glob("*.safetensors"))
        or any(directory.glob("pytorch_model*.bin"))
    ):
        return None
    try:
        if part_paths(files[0]) == files:
            return files[0]
    except GgufError as error:
        raise SettingsError(f"--model: {error}") from error
    names = ", ".join(path.name for path in files[:5])
    raise SettingsError(f"--model: {directory} has {len(files)} GGUF files; give the path of one ({names})")


def model_of_file(path: Path, flag: str, *, tokenizer: bool = True, beside: Path | None = None) -> Path:
    """Returns the model directory made from a file, from the cache if it was made before.

    `tokenizer`: whether the file's tokenizer is needed. `beside`: a directory whose files replace converted ones.
    Raises SettingsError, with a message that begins with `flag`, if the file cannot be used.
    """
    # The file itself may be a link, as in the hub's cache, where only the link has the name.
    path = path.parent.resolve() / path.name
    replaced = _replacements(beside)
    try:
        directory = models_cache(_CACHE, "gguf") / _key(path, tokenizer, replaced)
        if not (directory / _CONFIG).is_file():
            _make(directory, path, tokenizer, replaced)
        os.utime(directory)
    except GgufError as error:
        raise SettingsError(f"{flag}: {error}") from error
    except OSError as error:
        raise SettingsError(f"{flag}: {path} cannot be converted: {error}") from error
    return directory


def made_directories() -> list[Path]:
    """Returns the directories that were made from GGUF files; none if there is no cache yet."""
    try:
        return sorted(path.parent for path in models_cache(_CACHE, "gguf").glob(f"*/{_MADE}"))
    except OSError:
        return []


def _replacements(beside: Path | None) -> dict[str, Path]:
    if beside is None:
        return {}
    names = (_CONFIG, _GENERATION, _TOKENIZER, _TOKENIZER_CONFIG, *_MORE)
    return {name: beside / name for name in names if (beside / name).is_file()}


def _key(path: Path, tokenizer: bool, replaced: dict[str, Path]) -> str:
    digest = hashlib.sha256(f"{_FORMAT}\0{path}\0{tokenizer}".encode())
    for part in part_paths(path):
        status = part.stat()
        digest.update(f"\0{status.st_size}\0{status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
    for name, other in replaced.items():
        digest.update(f"\0{name}\0".encode() + other.read_bytes())
    return digest.hexdigest()[:32]


def _make(directory: Path, path: Path, tokenizer: bool, replaced: dict[str, Path]) -> None:
    model = GgufModel(path)
    documents = _documents(model, tokenizer, replaced)
    with made_whole(directory, _CONFIG, _KEPT) as made:
        for name, document in documents.items():
            (made / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
        for name, other in replaced.items():
            if name != _CONFIG:
                shutil.copyfile(other, made / name)
        (made / _MADE).touch()
        for part in model.paths:
            (made / part.name).symlink_to(part)


def _documents(model: GgufModel, tokenizer: bool, replaced: dict[str, Path]) -> dict[str, Any]:
    """Returns the contents of the files that are not taken from the model's own directory, by their names."""
    makers: dict[str, Callable[[], Any]] = {_GENERATION: lambda: generation_config(model)}
    documents = {name: make() for name, make in makers.items() if name not in replaced}
    documents[_CONFIG] = _given_config(model, replaced[_CONFIG]) if _CONFIG in replaced else model_config(model)
    if _TOKENIZER not in replaced and tokenizer:
        documents[_TOKENIZER], config = tokenizer_documents(model)
        if _TOKENIZER_CONFIG not in replaced:
            documents[_TOKENIZER_CONFIG] = config
    return documents


def _given_config(model: GgufModel, path: Path) -> Any:
    """Returns a config.json that lies beside the file, with the quantization of the file."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise GgufError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise GgufError(f"{path} must hold a JSON object")
    return cast(dict[str, Any], config) | {"quantization_config": model_config(model).get("quantization_config")}
