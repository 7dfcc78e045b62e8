"""Tokenizers without a `tokenizer.json`: a user's Python file, or a class of transformers (`--tokenizer-mode slow`).

`TokenizerAdapter` gives them the methods of the `tokenizers` library that the services use. A lock allows one call at a
time, because such tokenizers may not be thread-safe. Called by the tokenizer and the detokenizer at start-up.
Transformers is imported by name and only when needed, because the images of both services do not contain it.
"""

import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from antiphon.shared.config import ModelSettings
from antiphon.shared.flags import SettingsError

_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "*.tiktoken")


class _Special(NamedTuple):
    special: bool = True


class _Ids(NamedTuple):
    ids: list[int]


class TokenizerAdapter:
    """Wraps an object with methods `encode` and `decode`, and optional attributes `vocab_size` and `all_special_ids`.

    Its methods are those of `tokenizers.Tokenizer`. `encode` gets `add_special_tokens` and `decode` gets
    `skip_special_tokens` if they accept these arguments by name.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._encode_option = _takes(inner.encode, "add_special_tokens")
        self._decode_option = _takes(inner.decode, "skip_special_tokens")
        self._size = _size(inner)

    def no_truncation(self) -> None:
        """Switches the truncation of texts off."""

    def no_padding(self) -> None:
        """Switches the padding of texts off."""

    def get_added_tokens_decoder(self) -> dict[int, _Special]:
        """Returns the special tokens by id."""
        return {int(token_id): _Special() for token_id in getattr(self._inner, "all_special_ids", ())}

    def get_vocab_size(self) -> int:
        """Returns the number of tokens in the vocabulary, 0 if it is unknown."""
        return self._size

    def id_to_token(self, id: int) -> str | None:
        """Returns '' for an id of the vocabulary, otherwise None: callers only check whether the id is known."""
        return "" if id >= 0 and (id < self._size or not self._size) else None

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token by its string in the vocabulary; None without `get_vocab`."""
        get_vocab: Any = getattr(self._inner, "get_vocab", None)
        return None if get_vocab is None else get_vocab().get(token)

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool = True) -> list[_Ids]:
        """Returns the token ids of each text."""
        options = {"add_special_tokens": add_special_tokens} if self._encode_option else {}
        with self._lock:
            return [_Ids([int(token_id) for token_id in self._inner.encode(text, **options)]) for text in input]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        options = {"skip_special_tokens": skip_special_tokens} if self._decode_option else {}
        with self._lock:
            return str(self._inner.decode(list(ids), **options))


def load_adapter(settings: ModelSettings, directory: Path) -> TokenizerAdapter | None:
    """Returns the tokenizer for the settings, or None if the directory's `tokenizer.json` is to be used.

    Raises SettingsError if the tokenizer cannot be created.
    """
    if settings.tokenizer_extension_path:
        return _from_extension(Path(settings.tokenizer_extension_path).expanduser(), directory, settings)
    if settings.tokenizer_mode == "slow" or _needs_transformers(directory, settings.trust_remote_code):
        return _from_transformers(directory, settings)
    return None


def _needs_transformers(directory: Path, trusted: bool) -> bool:
    """Whether the directory's tokenizer files can be read only by transformers. False also if it has no such files."""
    if (directory / _FILE).is_file():
        return False
    patterns = (*_OTHER_FILES, "tokenization_*.py") if trusted else _OTHER_FILES
    return any(True for pattern in patterns for _ in directory.glob(pattern))


def _from_extension(path: Path, directory: Path, settings: ModelSettings) -> TokenizerAdapter:
    flag = "--tokenizer-extension-path"
    if not path.is_file():
        raise SettingsError(f"{flag}: there is no file {path}")
    spec = importlib.util.spec_from_file_location("antiphon_tokenizer_extension", path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{flag}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        inner = _make(module, directory, settings)
    except Exception as error:  # the user's code may raise any exception
        raise SettingsError(f"{flag}: {path} failed: {type(error).__name__}: {error}") from error
    if inner is None:
        raise SettingsError(f"{flag}: {path} has neither get_tokenizer(name_or_path, **options) nor a class Tokenizer")
    if not (callable(getattr(inner, "encode", None)) and callable(getattr(inner, "decode", None))):
        raise SettingsError(f"{flag}: the tokenizer that {path} makes lacks encode(text) or decode(token_ids)")
    return TokenizerAdapter(inner)


def _make(module: Any, directory: Path, settings: ModelSettings) -> Any:
    if callable(function := getattr(module, "get_tokenizer", None)):
        return function(
            str(directory),
            tokenizer_mode=settings.tokenizer_mode,
            trust_remote_code=settings.trust_remote_code,
            revision=settings.tokenizer_revision or None,
        )
    kind = getattr(module, "Tokenizer", None)
    if kind is None:
        return None
    return kind(str(directory)) if inspect.signature(kind).parameters else kind()


def _from_transformers(directory: Path, settings: ModelSettings) -> TokenizerAdapter:
    slow = settings.tokenizer_mode == "slow"
    problem = "--tokenizer-mode slow" if slow else f"--tokenizer: {directory} has no {_FILE}"
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        message = f"{problem}: that needs transformers, which is not installed here: pip install transformers"
        raise SettingsError(message) from error
    trusted = settings.trust_remote_code
    try:
        inner = transformers.AutoTokenizer.from_pretrained(directory, use_fast=False, trust_remote_code=trusted)
    except Exception as error:  # transformers' loaders and the model's own code may raise any exception
        reason = (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")
        untrusted = not trusted and any(directory.glob("*.py"))
        hint = " Its own code runs with --trust-remote-code only." if untrusted else ""
        message = f"{problem}: transformers cannot make a tokenizer of {directory}: {reason}.{hint}"
        raise SettingsError(message) from error
    return TokenizerAdapter(inner)


def _takes(method: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # a built-in function without a signature
        return False
    return any(each.name == name or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def _size(inner: Any) -> int:
    """Returns the number of tokens including added tokens, which `len` counts in transformers' tokenizers."""
    length = len(inner) if hasattr(inner, "__len__") else 0
    return max(length, int(getattr(inner, "vocab_size", 0) or 0))
