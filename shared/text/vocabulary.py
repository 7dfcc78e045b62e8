"""A model's vocabulary, read from its directory: tokens to bytes, to text, and which of them are special.

Not a tokenizer: it never splits text. Made once for a process and shared by every stream; the tables inside are filled
as tokens occur, so that start-up reads the file and nothing more.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE

from shared.config import ModelSettings, SettingsError
from shared.text.pieces import PieceRule, piece_rule
from shared.text.tokenizer_adapter import AnyTokenizer, load_adapter


class UnknownTokenError(ValueError):
    """A token id that neither the tokenizer nor the model has."""


class _Table(dict[int, bytes]):
    """Token id to bytes, computed at the first look-up. Bounded by the vocabulary: an unknown id raises."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._compute(token_id)
        return piece


class Vocabulary:
    """`pieces`, `visible_pieces` and `first_pieces` are only meant when `rule` is not None."""

    has_text = True
    """False when tokens stand for no text at all."""

    def __init__(self, tokenizer: AnyTokenizer, decoder: dict[str, Any] | None, model_vocab_size: int = 0) -> None:
        self.size = max(tokenizer.get_vocab_size(), model_vocab_size)
        self.special_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self.rule: PieceRule | None = piece_rule(decoder)
        self.pieces = _Table(self._piece)
        """What each token adds to a text."""
        self.visible_pieces = _Table(lambda i: b"" if i in self.special_ids else self._piece(i))
        """The same, with special tokens adding nothing."""
        self.first_pieces = _Table(self._first_piece)
        """What each token gives as the first of a text."""
        self.token_bytes = self.pieces if self.rule else _Table(self._decoded_bytes)
        """The exact bytes that a token stands for, wherever it is."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The tokenizer library's own decoding of a whole list. Raises UnknownTokenError."""
        for token_id in token_ids:
            self._string(token_id)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no whole character show as U+FFFD. Raises UnknownTokenError."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.token_bytes[token_id].decode("utf-8", "replace")
        return text

    def _string(self, token_id: int) -> str:
        string = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if string is not None:
            return string
        # Models round their vocabulary up: an id in the rounding is legal and has no text.
        if 0 <= token_id < self.size:
            return ""
        raise UnknownTokenError(f"token id {token_id} is outside the vocabulary of {self.size}")

    def _piece(self, token_id: int) -> bytes:
        assert self.rule is not None
        return self.rule.piece(self._string(token_id))

    def _first_piece(self, token_id: int) -> bytes:
        assert self.rule is not None
        return self.rule.first(self._string(token_id))

    def _decoded_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id], skip_special_tokens=False).encode()


class SilentVocabulary(Vocabulary):
    """The vocabulary of a server without a tokenizer (`--skip-tokenizer-init`): every token's text is empty."""

    has_text = False

    def __init__(self, model_vocab_size: int) -> None:
        super().__init__(Tokenizer(BPE()), {"type": "Fuse"}, model_vocab_size or 2**32)


def choose_vocabulary(settings: ModelSettings, tokenizer_directory: Path, model_directory: Path) -> Vocabulary:
    """The vocabulary that the settings ask for. Raises SettingsError."""
    if settings.skip_tokenizer_init:
        return SilentVocabulary(_model_vocab_size(model_directory / "config.json"))
    adapter = load_adapter(settings, tokenizer_directory)
    if adapter is None:
        return load_vocabulary(tokenizer_directory, model_directory)
    return Vocabulary(adapter, None, _model_vocab_size(model_directory / "config.json"))


def load_vocabulary(tokenizer_directory: Path, model_directory: Path) -> Vocabulary:
    """Reads `tokenizer.json` and, where there is one, the vocabulary size in the model's `config.json`.

    Raises SettingsError when the directory has no usable tokenizer.
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
