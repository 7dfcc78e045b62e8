"""Free text with tagged parts, such as tool calls: the content of the grammar kind `tagged_text`, as structs.

A part begins with a marker in the text, or at a position where text could begin. Between the parts the text is free.
The gateway describes calls in this form (`antiphon.services.gateway.apis.parsers.grammars`), and a request's
`structural_tag` is converted to it. `antiphon.shared.text.grammars.tagged_lark` converts it to the notation of the
library that compiles grammars.
"""

from typing import Any

import msgspec


class Literal(msgspec.Struct, frozen=True, tag="literal"):
    """A fixed text. A special token of the vocabulary that occurs in it may be output as that token or be spelled."""

    text: str


class Space(msgspec.Struct, frozen=True, tag="space"):
    """Up to 20 characters of whitespace between other pieces."""


class Name(msgspec.Struct, frozen=True, tag="name"):
    """Letters, digits and underscores of ASCII, the first of them no digit."""


class Json(msgspec.Struct, frozen=True, tag="json"):
    """JSON that follows a schema.

    `place`: index of the schema in the request, for errors; -1 if it is not from the request.
    """

    schema: dict[str, Any]
    place: int = -1


class Raw(msgspec.Struct, frozen=True, tag="raw"):
    """Any text up to the first `closing`, and `closing` itself. The text must end with `before`, which is not counted.

    `min_chars`, `max_chars`: bounds for the number of characters, without `before` and `closing`; None: no bound.
    """

    closing: str
    before: str = ""
    min_chars: int = 0
    max_chars: int | None = None


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """One of the pieces."""

    pieces: "tuple[Piece, ...]"


class Chain(msgspec.Struct, frozen=True, tag="chain"):
    """A sequence of pieces."""

    pieces: "tuple[Piece, ...]"


class Repeat(msgspec.Struct, frozen=True, tag="repeat"):
    """The piece any number of times, or with `at_most_once` once or not at all."""

    piece: "Piece"
    at_most_once: bool = False


class Some(msgspec.Struct, frozen=True, tag="some"):
    """At least one of the pieces, in their order, with a comma and whitespace between them."""

    pieces: "tuple[Piece, ...]"


Piece = Literal | Space | Name | Json | Raw | Choice | Chain | Repeat | Some


class Tag(msgspec.Struct, frozen=True):
    """A part of the text that begins with `mark`. `content` is what follows the mark, up to the end of the part."""

    mark: str
    content: Piece


class TaggedText(msgspec.Struct, frozen=True):
    """Free text with tags.

    `opening`: a part without a mark, which may stand at the beginning of the text and directly after a tag.
    `not_first`: characters with which free text must not begin, also after whitespace, because they begin an opening.
    Without `is_free` there are no tags and no free text: the output is the opening, with whitespace around it.
    """

    tags: tuple[Tag, ...]
    opening: Piece | None = None
    not_first: str = ""
    is_free: bool = True

    def encode(self) -> str:
        """Returns the text of the grammar."""
        return msgspec.json.encode(self).decode()


def decode(text: str) -> TaggedText:
    """Returns what `TaggedText.encode` has encoded."""
    return _DECODER.decode(text)


def schemas(tagged: TaggedText) -> list[Json]:
    """Returns the schemas of a tagged text that are the request's."""
    found: list[Json] = []
    waiting: list[Piece] = [tag.content for tag in tagged.tags]
    if tagged.opening is not None:
        waiting.append(tagged.opening)
    while waiting:
        match waiting.pop():
            case Json() as piece if piece.place >= 0:
                found.append(piece)
            case Choice(pieces) | Chain(pieces) | Some(pieces):
                waiting += pieces
            case Repeat(piece):
                waiting.append(piece)
            case _:
                pass
    return found


_DECODER = msgspec.json.Decoder(TaggedText)
