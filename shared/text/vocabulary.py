"""A model's vocabulary, read from its directory: the bytes and text of each token, and which tokens are special.

A vocabulary only decodes; texts are encoded by `codec`. It is created once per process and shared by all streams. Its
tables are filled when tokens first occur, so that start-up only has to read the file.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

from antiphon.shared.config import ModelSettings
from antiphon.shared.flags import SettingsError
from antiphon.shared.text.pieces import PieceRule, piece_rule
from antiphon.shared.text.tokenizer_adapter import TokenizerAdapter, load_adapter

_TABLES_MAX = 16
"""Maximum number of cached tables for sets of shown special tokens. There is one set per tool-call and reasoning
format.
"""


class UnknownTokenError(ValueError):
    """A token id is neither in the tokenizer's nor in the model's vocabulary."""


class _Table(dict[int, bytes]):
    """Maps token ids to bytes, which are computed at the first look-up.

    An unknown id raises an error, so the table has at most as many entries as the vocabulary.
    """

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._compute(token_id)
        return piece


class Vocabulary:
    """The tokens of a model. `pieces`, `visible_pieces` and `first_pieces` may be used only if `rule` is not None."""

    has_text = True
    """Whether tokens have text. False on a server without a tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer | TokenizerAdapter, decoder: dict[str, Any] | None, model_vocab_size: int = 0
    ) -> None:
        self.size = max(tokenizer.get_vocab_size(), model_vocab_size)
        self.special_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self.rule: PieceRule | None = piece_rule(decoder)
        self.pieces = _Table(self._piece)
        """The bytes that each token adds to a text."""
        self.visible_pieces = _Table(lambda i: b"" if i in self.special_ids else self._piece(i))
        """The bytes that each token adds to a text if special tokens are skipped: none for special tokens."""
        self.first_pieces = _Table(self._first_piece)
        """The bytes of each token as the first token of a text."""
        self.token_bytes = self.pieces if self.rule else _Table(self._decoded_bytes)
        """The exact bytes of each token, independent of its place in a text."""
        self.pieces_with = lru_cache(maxsize=_TABLES_MAX)(self._pieces_with)
        """The bytes that each token adds to a text if special tokens are skipped, except those with these texts."""
        self.hidden_ids = lru_cache(maxsize=_TABLES_MAX)(self._hidden_ids)
        """The ids of the special tokens, except those with these texts."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    @cached_property
    def silent(self) -> "Vocabulary":
        """A vocabulary of the same size with empty text for every token."""
        return SilentVocabulary(self.size)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of a list of tokens as the tokenizer library decodes it. Raises UnknownTokenError."""
        for token_id in token_ids:
            self._string(token_id)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token; bytes that are not a whole character give U+FFFD. Raises UnknownTokenError."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes[token_id].decode("utf-8", "replace")
        return text

    def _string(self, token_id: int) -> str:
        string = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if string is not None:
            return string
        # Models round the size of their vocabulary up. The additional ids are legal and have no text.
        if 0 <= token_id < self.size:
            return ""
        raise UnknownTokenError(f"token id {token_id} is outside the vocabulary of {self.size}")

    def _hidden_ids(self, shown: tuple[str, ...]) -> frozenset[int]:
        return frozenset(i for i in self.special_ids if self._tokenizer.id_to_token(i) not in shown)

    def _pieces_with(self, shown: tuple[str, ...]) -> dict[int, bytes]:
        hidden = self.hidden_ids(shown)
        return _Table(lambda i: b"" if i in hidden else self._piece(i))

    def _piece(self, token_id: int) -> bytes:
        assert self.rule is not None
        return self.rule.piece(self._string(token_id))

    def _first_piece(self, token_id: int) -> bytes:
        assert self.rule is not None
        return self.rule.first(self._string(token_id))

    def _decoded_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id], skip_special_tokens=False).encode()


class SilentVocabulary(Vocabulary):
    """The vocabulary of a server without a tokenizer (`--skip-tokenizer-init`): the text of every token is empty."""

    has_text = False

    def __init__(self, model_vocab_size: int) -> None:
        super().__init__(Tokenizer(BPE()), {"type": "Fuse"}, model_vocab_size or 2**32)


def choose_vocabulary(settings: ModelSettings, tokenizer_directory: Path, model_directory: Path) -> Vocabulary:
    """Returns the vocabulary for the settings. Raises SettingsError."""
    if settings.skip_tokenizer_init:
        return SilentVocabulary(_model_vocab_size(model_directory / "config.json"))
    adapter = load_adapter(settings, tokenizer_directory)
    if adapter is None:
        return load_vocabulary(tokenizer_directory, model_directory)
    return Vocabulary(adapter, None, _model_vocab_size(model_directory / "config.json"))


def load_vocabulary(tokenizer_directory: Path, model_directory: Path) -> Vocabulary:
    """Returns the vocabulary of `tokenizer.json`, with the vocabulary size in the model's `config.json` if it exists.

    Raises SettingsError if the directory has no usable tokenizer.
    """
    path = tokenizer_directory / "tokenizer.json"
    if not path.is_file():
        raise SettingsError(f"--tokenizer: {tokenizer_directory} has no tokenizer.json (a 'fast' tokenizer is needed).")
    data = path.read_bytes()
    try:
        decoder = msgspec.json.decode(data, type=_TokenizerFile).decoder
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare exceptions for files that it cannot read
        raise SettingsError(f"--tokenizer: {path} cannot be read: {error}") from error
    return Vocabulary(tokenizer, decoder, _model_vocab_size(model_directory / "config.json"))


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


class _ModelConfig(msgspec.Struct):
    vocab_size: int = 0
    text_config: "_ModelConfig | None" = None


def _model_vocab_size(path: Path) -> int:
    if not path.is_file():
        return 0
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_ModelConfig)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"--model: {path} cannot be read: {error}") from error
    return max(config.vocab_size, config.text_config.vocab_size if config.text_config else 0)
