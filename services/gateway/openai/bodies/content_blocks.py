"""Reads the text of content blocks, of which messages consist in several APIs. Pure."""

from collections.abc import Collection, Mapping
from typing import Any

from shared.errors import ServiceError
from shared.request.checks import missing, refuse, unsupported

Block = Mapping[str, Any]
"""A content block as decoded JSON: `type` and the fields of that type."""
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
    """Raises ServiceError('unsupported_parameter') for a field of a block that has no place in the API, or no effect.

    `no_effect`: fields that are ignored if they have one of these values; None: any value.
    """
    for name, value in block.items():
        if name in known or value is None:
            continue
        if name not in no_effect:
            raise ServiceError("unsupported_parameter", f"'{path}' has an unknown field '{name}'.", param=path)
        allowed = no_effect[name]
        if allowed is not None and value not in allowed:
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
