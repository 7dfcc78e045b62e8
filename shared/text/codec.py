"""A model's text codec: text to token ids and back, by the rules of its tokenizer. Thread-safe after construction.

Reads the files of a model directory in Hugging Face layout; needs only the `tokenizers` library. Chat templates are
rendered by `chat_template`; tokenizers without a `tokenizer.json` are loaded by `tokenizer_adapter`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from tokenizers import Tokenizer

from antiphon.shared.config import ModelSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.text.infill import find_infill_tokens, infill_ids
from antiphon.shared.text.tokenizer_adapter import TokenizerAdapter, load_adapter
from antiphon.shared.text.truncation import cut_inside, encode_first, encode_first_of_pairs

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NO_TOKENIZER = "This server has no tokenizer (--skip-tokenizer-init). Give the 'prompt' as token ids, and no text."
_FOR_TOOLS = "tool_use"
"""transformers' name of the template for requests with tools."""
_TEMPLATE_MARKS = ("{{", "{%", "{#", "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """Data about the tokenizer from files other than `tokenizer.json`.

    `named_tokens`: the texts of `bos_token`, `eos_token` etc. by name, for use in chat templates. `chat_template`: the
    template's text, or None if there is no template. `conv_template`: the template's name, if it is a named
    conversation template. `end_token_ids`: tokens that end an answer in this template, beside the model's own end
    tokens. `tool_template`: the template for requests with tools, if the tokenizer has another one for them.
    """

    named_tokens: dict[str, str]
    chat_template: str | None
    conv_template: str = ""
    end_token_ids: tuple[int, ...] = ()
    tool_template: str | None = None

    def template(self, with_tools: bool) -> str | None:
        """Returns the template for a request, which may have tools."""
        return self.tool_template if with_tools and self.tool_template is not None else self.chat_template


class EncodedPair(NamedTuple):
    """A pair of texts as one prompt. `num_first`: see `PoolingParams.num_first_tokens`."""

    token_ids: list[int]
    num_first: int


class Codec:
    """Converts text to token ids and back.

    `special_ids` and `special_texts` are the ids and the known texts of the special tokens. `infill_end_ids` are tokens
    by which the model ends a text that it fills in, besides its end token.
    """

    def __init__(self, tokenizer: Tokenizer | TokenizerAdapter) -> None:
        # The tokenizer's file may enable truncation and padding for training. Requests must not be cut or padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        special = {i: t for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self.special_ids = frozenset(special)
        self.special_texts = tuple(getattr(token, "content", "") for token in special.values())
        self._infill_tokens = find_infill_tokens(tokenizer.token_to_id)
        self.infill_end_ids = self._infill_tokens.end if self._infill_tokens is not None else ()
        self._anchor = self.encode(["a"], add_special_tokens=False)[0][-1:]
        self._anchor_chars = len(self.decode(self._anchor))

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, keep: int = 0) -> list[list[int]]:
        """Returns the token ids of each text. `keep`: maximum number of ids per text; the first ones are kept; 0: all.

        Raises ServiceError if `keep` leaves no room beside the special tokens. The `tokenizers` library releases the
        interpreter lock while it encodes.
        """
        if keep and isinstance(self._tokenizer, Tokenizer):
            return encode_first(self._tokenizer, texts, keep, add_special_tokens=add_special_tokens)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        if keep:
            plain = self.encode(texts, add_special_tokens=False)
            return [cut_inside(one.ids, inner, keep) for one, inner in zip(encodings, plain, strict=True)]
        return [encoding.ids for encoding in encodings]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, add_special_tokens: bool, keep: int = 0
    ) -> list[EncodedPair]:
        """Returns each pair of texts, combined by the tokenizer. `keep`: see `encode`.

        Raises ServiceError('unsupported_parameter') for a tokenizer that has no pairs.
        """
        if not isinstance(self._tokenizer, Tokenizer):
            reason = "Pairs of texts need a tokenizer with a tokenizer.json; this model's tokenizer takes single texts."
            raise ServiceError("unsupported_parameter", reason, param="model")
        if keep:
            encodings = encode_first_of_pairs(self._tokenizer, pairs, keep, add_special_tokens=add_special_tokens)
        else:
            encodings = self._tokenizer.encode_batch(list(pairs), add_special_tokens=add_special_tokens)
        return [EncodedPair(one.ids, one.type_ids.index(1) if 1 in one.type_ids else 0) for one in encodings]

    def encode_infill(self, prefixes: Sequence[str], suffix: str, *, add_special_tokens: bool) -> list[list[int]]:
        """Returns the prompts for filling in the text between each prefix and the suffix.

        Raises ServiceError('unsupported_parameter') if the tokenizer has no special tokens for this.
        """
        tokens = self._infill_tokens
        if tokens is None:
            text = "The parameter 'suffix' is not supported: this model's tokenizer has no tokens for filling in text."
            raise ServiceError("unsupported_parameter", text, param="suffix")
        start = self.encode([""], add_special_tokens=True)[0] if add_special_tokens else []
        return [[*start, *infill_ids(tokens, self._plain_ids, self._inner_text, one, suffix)] for one in prefixes]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids. Ids outside the vocabulary add no text."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def knows(self, token_id: int) -> bool:
        """Whether the vocabulary has this id."""
        return self._tokenizer.id_to_token(token_id) is not None

    def has_token(self, token_id: int, text: str) -> bool:
        """Whether the vocabulary has this id, with the token text `text` if the vocabulary gives token texts.

        A `TokenizerAdapter` gives '' as the text of every id that it knows, which counts as equal.
        """
        return self._tokenizer.id_to_token(token_id) in (text, "")

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token inside a longer text.

        A leading space is kept; a token that is only a part of a character gives U+FFFD.
        """
        return self._inner_text([token_id])

    def vocabulary_text(self, token_id: int) -> str:
        """Returns a token as the vocabulary writes it, such as `Ġis`; without a vocabulary, its text."""
        return self._tokenizer.id_to_token(token_id) or self.token_text(token_id)

    def _plain_ids(self, text: str) -> list[int]:
        return self.encode([text], add_special_tokens=False)[0]

    def _inner_text(self, token_ids: Sequence[int]) -> str:
        return self.decode([*self._anchor, *token_ids])[self._anchor_chars :]


class NoCodec(Codec):
    """The codec of a server without a tokenizer (`--skip-tokenizer-init`): every method raises ServiceError."""

    def __init__(self) -> None:
        self.special_ids, self.special_texts, self.infill_end_ids = frozenset[int](), (), ()

    def __getattr__(self, name: str) -> NoReturn:
        # Every method of Codec uses one of these, which only a codec with a tokenizer has.
        if name in ("_tokenizer", "_infill_tokens", "_anchor"):
            raise ServiceError("invalid_value", NO_TOKENIZER, param="prompt")
        raise AttributeError(name)


def choose_codec(settings: ModelSettings, directory: Path) -> Codec:
    """Returns the codec for the settings, with the tokenizer in `directory`. Raises SettingsError."""
    if settings.skip_tokenizer_init:
        return NoCodec()
    adapter = load_adapter(settings, directory)
    return Codec(adapter) if adapter is not None else load_codec(directory)


def load_codec(directory: Path) -> Codec:
    """Returns the codec of a directory's `tokenizer.json`. Raises SettingsError if that is missing or unusable."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise SettingsError(f"--tokenizer: {directory} has no tokenizer.json (a 'fast' tokenizer is needed).")
    try:
        return Codec(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare exceptions for files that it cannot read
        raise SettingsError(f"--tokenizer: {path} cannot be read: {error}") from error


def load_facts(directory: Path, chat_template: str = "") -> TextFacts:
    """Returns the named tokens and the chat template of a directory.

    `chat_template`, a file or the template's text, replaces the directory's own template. Raises SettingsError for a
    file that cannot be read.
    """
    config = _read_object(directory / "tokenizer_config.json")
    named = {**_named_tokens(_read_object(directory / "special_tokens_map.json")), **_named_tokens(config)}
    if chat_template:
        return TextFacts(named_tokens=named, chat_template=given_template(chat_template))
    own, tool_template = _own_templates(directory, config)
    return TextFacts(named_tokens=named, chat_template=own, tool_template=tool_template)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named tokens of a configuration file. A value is the token's text or an object with a `content`."""
    found: dict[str, str] = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        text: Any = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def given_template(chat_template: str) -> str:
    """Returns the text of a chat template that is given as text or as a file's path. Raises SettingsError."""
    if any(mark in chat_template for mark in _TEMPLATE_MARKS):
        # A template on a command line is one line, with line breaks and tabs written as \n and \t.
        return chat_template.replace("\\n", "\n").replace("\\t", "\t")
    path = Path(chat_template)
    if not path.is_file():
        raise SettingsError(f"--chat-template: {chat_template!r} is neither a file nor a Jinja template.")
    return _read_text(path)


def _own_templates(directory: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns a directory's chat template, and the template for requests with tools if it is a different one."""
    if (directory / "chat_template.jinja").is_file():
        for_tools = directory / "additional_chat_templates" / f"{_FOR_TOOLS}.jinja"
        return _read_text(directory / "chat_template.jinja"), _read_text(for_tools) if for_tools.is_file() else None
    for source in (_read_object(directory / "chat_template.json"), config):
        template: Any = source.get("chat_template")
        if isinstance(template, list):  # several named templates
            items = cast(list[dict[str, Any]], template)
            named: dict[str, Any] = {item["name"]: item["template"] for item in items}
            return named.get("default"), named.get(_FOR_TOOLS)
        if isinstance(template, str):
            return template, None
    return None, None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise SettingsError(f"--tokenizer: {path} is not valid JSON: {error}") from error
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
