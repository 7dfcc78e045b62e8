"""Reads the texts and images of content blocks, of which messages consist in several APIs. Pure."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from antiphon.services.gateway.edge.access.call import current_call, ignore
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import missing, refuse, unsupported
from antiphon.shared.request.conversation import ContentPart, NamedPart

Block = Mapping[str, Any]
"""A content block as decoded JSON: `type` and the fields of that type."""
ReadImage = Callable[[Block, str], NamedPart]
"""Returns the image of a block with this path. Raises ServiceError that names the block or its member."""
Content = str | list[int | ContentPart]
"""The content of a turn of a conversation."""
_ASKS_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
NOTHING: Mapping[str, Collection[Any] | None] = {}


def block_text(block: Block, path: str, types: Collection[str], no_effect: Collection[str] = ()) -> str:
    """Returns the text of a block.

    `types`: the names that a block of text has in the API; `no_effect`: fields of such a block that are ignored,
    because no answer depends on them. Raises ServiceError that names the block by its `path`: for another type
    ('unsupported_parameter'), for a missing or unknown field, and for a text that is no string.
    """
    kind = block.get("type")
    if not isinstance(kind, str):
        missing(f"{path}.type")
    if kind not in types:
        unsupported(f"{path}.type", f"Content of type '{kind}' is")
    check_fields(block, ("type", "text"), path, dict.fromkeys(no_effect))
    text = block.get("text")
    if text is None:
        missing(f"{path}.text")
    if not isinstance(text, str):
        refuse(f"{path}.text", "must be a string")
    return text


def check_fields(
    block: Block, known: Collection[str], path: str, no_effect: Mapping[str, Collection[Any] | None] = NOTHING
) -> None:
    """Tells the hints among the fields of a block: those that are not known.

    `no_effect`: hints, each with the values that it may have; None: any value. Raises
    ServiceError('unsupported_parameter') for another value, and in the strict mode for a field that nobody knows.
    """
    for name, value in block.items():
        if name in known or value in _ASKS_NOTHING:
            continue
        if name not in no_effect and current_call().strict.unknown_fields:
            raise ServiceError("unsupported_parameter", f"'{path}' has an unknown field '{name}'.", param=path)
        allowed = no_effect.get(name)
        if allowed is None:
            ignore(f"{path}.{name[: limits.FIELD_NAME_CHARS_MAX]}")
        elif value not in allowed:
            unsupported(f"{path}.{name}", f"The value of '{path}.{name}' is")


def content_text(
    content: str | list[dict[str, Any]], path: str, types: Collection[str], no_effect: Collection[str] = ()
) -> str:
    """Returns the text of a content that is a string or a list of text blocks, which are joined by line breaks.

    The chat template gets text parts joined in the same way at `/v1/chat/completions`. Raises ServiceError.
    """
    if isinstance(content, str):
        return content
    blocks = [block_text(block, f"{path}[{number}]", types, no_effect) for number, block in enumerate(content)]
    return "\n".join(blocks)


def content_part(
    block: Block,
    path: str,
    types: Collection[str],
    images: Mapping[str, ReadImage],
    no_effect: Collection[str] = (),
) -> ContentPart:
    """Returns the text or the image of a block.

    `images`: functions that read a block with an image, by the name of the block's type. Other parameters: see
    `block_text`.
    """
    kind = block.get("type")
    if isinstance(kind, str) and kind in images:
        return images[kind](block, path)
    return ContentPart(type="text", text=block_text(block, path, types, no_effect))


def content_parts(
    blocks: list[dict[str, Any]],
    path: str,
    types: Collection[str],
    images: Mapping[str, ReadImage],
    no_effect: Collection[str] = (),
) -> list[ContentPart]:
    """Returns the texts and images of a list of blocks, see `content_part`."""
    return [content_part(block, f"{path}[{number}]", types, images, no_effect) for number, block in enumerate(blocks)]


def content_of(parts: list[ContentPart]) -> Content:
    """Returns the content of a turn: the parts if there is an image, else the texts, which are joined by line breaks.

    The chat template gets text parts joined in the same way at `/v1/chat/completions`.
    """
    if any(isinstance(part, NamedPart) for part in parts):
        return [*parts]
    return "\n".join([part.text or "" for part in parts])


def joined_contents(first: Content, then: Content) -> Content:
    """Returns the content of one turn that was two: texts are joined by a line break."""
    if isinstance(first, str) and isinstance(then, str):
        return f"{first}\n{then}"
    return [*_parts(first), *_parts(then)]


def _parts(content: Content) -> list[int | ContentPart]:
    if isinstance(content, str):
        return [ContentPart(type="text", text=content)] if content else []
    return content
