"""The bytes that each token adds to a text. Pure; `vocabulary` passes the decoder description of `tokenizer.json`.

Most tokenizers decode token by token: the text of a sequence is its tokens' bytes, concatenated and decoded as UTF-8,
and only the first token of a text may lose a leading space. For such a decoder `piece_rule` returns a rule, and
detokenizing one more token costs one table look-up. For all other decoders (WordPiece, unknown sequences of decoders)
`piece_rule` returns None.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

REPLACE_SUBPART = "replace"
"""UTF-8 error handler: one U+FFFD for each maximal invalid part of a character, as byte-level decoders do."""
REPLACE_EACH_BYTE = "antiphon_each_byte"
"""UTF-8 error handler: one U+FFFD for each invalid byte, as byte-fallback decoders do."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Description = Mapping[str, Any]
Piece = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class PieceRule:
    """Converts a token's vocabulary string to its bytes.

    `first` is used for the first token of a text, `piece` for all others. `errors` names the codec error handler for
    bytes that are not valid UTF-8.
    """

    piece: Piece
    first: Piece
    errors: str = REPLACE_SUBPART


def piece_rule(decoder: Description | None) -> PieceRule | None:
    """Returns the rule of a decoder, or None if its text is not the concatenation of its tokens' bytes."""
    kind = decoder["type"] if decoder else ""
    if decoder is None or kind == "WordPiece":
        return None
    if kind == "ByteLevel":
        return PieceRule(_byte_level_piece, _byte_level_piece)
    if kind == "Metaspace":
        return _metaspace_rule(decoder)
    return _sequence_rule(decoder["decoders"] if kind == "Sequence" else [decoder])


def _byte_level_alphabet() -> dict[str, int]:
    """Returns GPT-2's table of byte-level vocabularies: from printable character to byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[character] for character in token])
    except KeyError:  # an added token, whose vocabulary string is plain text
        return token.encode()


def _metaspace_rule(decoder: Description) -> PieceRule:
    mark: str = decoder["replacement"]
    prefixed = decoder.get("prepend_scheme", "always" if decoder.get("add_prefix_space", True) else "never") != "never"
    piece: Piece = lambda token: token.replace(mark, " ").encode()  # noqa: E731 - closes over the mark
    first: Piece = lambda token: token.replace(mark, "").encode()  # noqa: E731
    return PieceRule(piece, first if prefixed else piece)


def _sequence_rule(decoders: list[Description]) -> PieceRule | None:
    """Returns the rule of a SentencePiece decoder; None for any other sequence.

    Its steps are replacements, then byte fallback, then fusing, then the removal of at most one leading space.
    """
    replacements: list[tuple[str, str]] = []
    steps = list(decoders)
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    fallback = _drop(steps, {"type": "ByteFallback"})
    fused = _drop(steps, {"type": "Fuse"})
    strips = fused and _drop(steps, {"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if steps or not (replacements or fallback or fused):
        return None
    piece = _replacing_piece(tuple(replacements), fallback)
    first: Piece = lambda token: piece(token).removeprefix(b" ")  # noqa: E731 - closes over the piece
    return PieceRule(piece, first if strips else piece, REPLACE_EACH_BYTE if fallback else REPLACE_SUBPART)


def _drop(steps: list[Description], expected: Description) -> bool:
    if steps and dict(steps[0]) == expected:
        del steps[0]
        return True
    return False


def _replacing_piece(replacements: tuple[tuple[str, str], ...], fallback: bool) -> Piece:
    def piece(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if fallback else None
        return bytes([int(match[1], 16)]) if match else token.encode()

    return piece


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _each_byte)
