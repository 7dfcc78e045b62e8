"""Reads the small files of a model directory: config.json, generation_config.json and the end-of-sequence tokens.

Weights are read by `weights.py`. Of the tokenizer's files only the id of the end-of-sequence token is read. Called by
the workers at start-up.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any, cast

import msgspec

from antiphon.services.engine.models.config_fields import token_ids
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.registry import find_family, without_head
from antiphon.shared.errors import ServiceError

SENTENCE_MODULES = "modules.json"
"""The file with which sentence-transformers lists the parts of an embedding model."""
SMALL_MODEL_BYTES = 64 * 2**20
"""Weights smaller than this are read in one or two milliseconds."""


def read_config(model_dir: Path) -> dict[str, Any]:
    """Returns the content of config.json. Raises `ServiceError` if the directory has none or if it is invalid.

    In a directory of sentence-transformers the architecture is that of the decoder without its head: such a model gives
    embeddings, and its checkpoint may lack the head whatever its config says.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ServiceError(
            "invalid_value", f"{model_dir} is not a model directory: it has no config.json.", param="model"
        )
    config = read_json(path)
    _check_names(config)
    if (model_dir / SENTENCE_MODULES).is_file():
        config["architectures"] = [without_head(str(name)) for name in config.get("architectures") or []]
    return config


def describe_model(model_dir: Path) -> DecoderDescription:
    """Returns the description of the model in a directory without loading the weights. Raises `ServiceError`."""
    config = read_config(model_dir)
    return find_family(config).describe(config)


def _check_names(config: dict[str, Any]) -> None:
    """Raises `ServiceError` unless the fields that name the model's kind are names."""
    names: Any = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast(list[Any], names)):
        message = "config.json: 'architectures' must be a list of names."
        raise ServiceError("invalid_value", message, param="model")
    if not isinstance(config.get("model_type", ""), str | None):
        raise ServiceError("invalid_value", "config.json: 'model_type' must be a name.", param="model")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, {} if there is no file. Raises `ServiceError` for any other content."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ServiceError("invalid_value", f"{path} is not valid JSON: {error}", param="model") from error
    if not isinstance(value, dict):
        raise ServiceError("invalid_value", f"{path} must hold a JSON object.", param="model")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON list of objects in a file, [] if there is no file. Raises `ServiceError` for other content."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]]) if path.is_file() else []
    except msgspec.MsgspecError as error:
        message = f"{path} must hold a JSON list of objects: {error}"
        raise ServiceError("invalid_value", message, param="model") from error


def weight_file_bytes(model_dir: Path) -> int:
    """Returns the total size of all weight files."""
    patterns = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
    files = itertools.chain.from_iterable(map(model_dir.glob, patterns))
    return sum(path.stat().st_size for path in files)


def useful_threads(model_dir: Path) -> int:
    """Returns the default number of compute threads: 1 for a small model, else the number of cores.

    A small model's operations are too short to divide: while the other services use a core too, the threads wait for
    each other longer than they compute.
    """
    return 1 if weight_file_bytes(model_dir) < SMALL_MODEL_BYTES else len(os.sched_getaffinity(0))


def eos_token_ids(model_dir: Path, description: DecoderDescription) -> frozenset[int]:
    """Returns every token that ends a sequence, from config.json, generation_config.json and the tokenizer's files."""
    generation = token_ids(read_json(model_dir / "generation_config.json"), "eos_token_id")
    return frozenset((*description.eos_token_ids, *generation, *_tokenizer_eos(model_dir)))


def _tokenizer_eos(model_dir: Path) -> list[int]:
    facts = read_json(model_dir / "tokenizer_config.json")
    token = facts.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return []
    decoder = facts.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        return [int(key) for key, entry in decoder.items() if entry.get("content") == text]
    path = model_dir / "tokenizer.json"
    return [token.id for token in _added_tokens(path) if token.content == text] if path.is_file() else []


class _AddedToken(msgspec.Struct):
    id: int
    content: str = ""


class _TokenizerFile(msgspec.Struct):
    """The only field needed of tokenizer.json, which has many megabytes; the decoder skips all other fields."""

    added_tokens: list[_AddedToken] = []


def _added_tokens(path: Path) -> list[_AddedToken]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except msgspec.MsgspecError as error:
        raise ServiceError("invalid_value", f"{path} is not a tokenizer's file: {error}", param="model") from error
