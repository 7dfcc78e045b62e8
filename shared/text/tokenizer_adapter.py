"""Tokenizers that are no `tokenizer.json`: a user's own file, or a class of transformers (`--tokenizer-mode slow`).

`TokenizerAdapter` gives them the few methods of the `tokenizers` library that the services use, one call at a time:
nothing says that they are safe on several threads. Called by the tokenizer and the detokenizer at start-up.
Transformers is imported by name and only when it is asked for: the images of both services do without it.
"""

import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shared.config import ModelSettings, SettingsError

_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "*.tiktoken")


class AddedToken(Protocol):
    """What a vocabulary says about a token beyond its text."""

    @property
    def special(self) -> bool:
        """True when the token is no text."""
        ...


class Encoding(Protocol):
    """An encoded text."""

    @property
    def ids(self) -> list[int]:
        """Its token ids."""
        ...


class AnyTokenizer(Protocol):
    """What the services need of `tokenizers.Tokenizer`."""

    def no_truncation(self) -> None:
        """Texts are never cut."""
        ...

    def no_padding(self) -> None:
        """Texts are never filled up."""
        ...

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """`AddedToken` by id."""
        ...

    def get_vocab_size(self) -> int:
        """Tokens in the vocabulary, 0 when nobody knows."""
        ...

    def id_to_token(self, id: int) -> str | None:
        """A token's string in the vocabulary."""
        ...

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool = True) -> Sequence[Any]:
        """An `Encoding` of each text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        ...


class _Special(NamedTuple):
    special: bool = True


class _Ids(NamedTuple):
    ids: list[int]


class TokenizerAdapter:
    """Wraps an object with `encode` and `decode`. What else it may have: `vocab_size`, `all_special_ids`, `bos_token`.

    Its methods get `add_special_tokens` and `skip_special_tokens` by name if they take them.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._encode_option = _takes(inner.encode, "add_special_tokens")
        self._decode_option = _takes(inner.decode, "skip_special_tokens")
        self._size = _size(inner)

    def no_truncation(self) -> None:
        """See AnyTokenizer."""

    def no_padding(self) -> None:
        """See AnyTokenizer."""

    def get_added_tokens_decoder(self) -> dict[int, _Special]:
        """See AnyTokenizer."""
        return {int(token_id): _Special() for token_id in getattr(self._inner, "all_special_ids", ())}

    def get_vocab_size(self) -> int:
        """See AnyTokenizer."""
        return self._size

    def id_to_token(self, id: int) -> str | None:
        """See AnyTokenizer. The string is empty: only whether there is one matters to those who ask."""
        return "" if id >= 0 and (id < self._size or not self._size) else None

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool = True) -> list[_Ids]:
        """See AnyTokenizer."""
        options = {"add_special_tokens": add_special_tokens} if self._encode_option else {}
        with self._lock:
            return [_Ids([int(token_id) for token_id in self._inner.encode(text, **options)]) for text in input]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See AnyTokenizer."""
        options = {"skip_special_tokens": skip_special_tokens} if self._decode_option else {}
        with self._lock:
            return str(self._inner.decode(list(ids), **options))


def load_adapter(settings: ModelSettings, directory: Path) -> TokenizerAdapter | None:
    """The tokenizer that the settings ask for, or None when it is the directory's `tokenizer.json`.

    Raises SettingsError when it cannot be made.
    """
    if settings.tokenizer_extension_path:
        return _from_extension(Path(settings.tokenizer_extension_path).expanduser(), directory, settings)
    if settings.tokenizer_mode == "slow" or _needs_transformers(directory, settings.trust_remote_code):
        return _from_transformers(directory, settings)
    return None


def _needs_transformers(directory: Path, trusted: bool) -> bool:
    """True for files that only transformers understands. A directory with none at all is somebody else's complaint."""
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
    except Exception as error:  # it is somebody else's code
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
    wanted = "--tokenizer-mode slow" if slow else f"--tokenizer: {directory} has no {_FILE}"
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        message = f"{wanted}: that needs transformers, which is not installed here: pip install transformers"
        raise SettingsError(message) from error
    trusted = settings.trust_remote_code
    try:
        inner = transformers.AutoTokenizer.from_pretrained(directory, use_fast=False, trust_remote_code=trusted)
    except Exception as error:  # whatever its loaders, or the model's own code, raise
        reason = (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")
        untrusted = not trusted and any(directory.glob("*.py"))
        hint = " Its own code runs with --trust-remote-code only." if untrusted else ""
        message = f"{wanted}: transformers cannot make a tokenizer of {directory}: {reason}.{hint}"
        raise SettingsError(message) from error
    return TokenizerAdapter(inner)


def _takes(method: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # built in: it does not say
        return False
    return any(each.name == name or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def _size(inner: Any) -> int:
    """Tokens with the added ones, which transformers counts by `len`."""
    length = len(inner) if hasattr(inner, "__len__") else 0
    return max(length, int(getattr(inner, "vocab_size", 0) or 0))
