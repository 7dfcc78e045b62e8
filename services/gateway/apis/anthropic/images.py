"""Reads the images in messages of Anthropic's API: blocks of the type `image`. Pure."""

from collections.abc import Mapping
from typing import Any

from antiphon.services.gateway.apis.openai.bodies.content_blocks import check_fields
from antiphon.shared.request.checks import missing, refuse, unsupported
from antiphon.shared.request.conversation import NamedPart

TYPE = "image"
_BLOCK = frozenset({"type", "source"})
_NO_EFFECT = {"cache_control": None, "transformations": ({},)}
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


def read(block: Mapping[str, Any], path: str) -> NamedPart:
    """Returns the image of a block. Raises ServiceError that names the block or its member."""
    check_fields(block, _BLOCK, path, _NO_EFFECT)
    source = block.get("source")
    path_of_source = f"{path}.source"
    if source is None:
        missing(path_of_source)
    if not isinstance(source, dict):
        refuse(path_of_source, "must be an object")
    kind = _text(source, "type", path_of_source)
    if kind == "url":
        check_fields(source, ("type", "url"), path_of_source)
        return NamedPart(path=path, field="source.url", image_url=_text(source, "url", path_of_source))
    if kind != "base64":
        unsupported(f"{path_of_source}.type", f"'{path_of_source}.type' other than 'base64' and 'url' is")
    check_fields(source, ("type", "media_type", "data"), path_of_source)
    media_type = _text(source, "media_type", path_of_source)
    if media_type not in _MEDIA_TYPES:
        refuse(f"{path_of_source}.media_type", f"must be one of {', '.join(_MEDIA_TYPES)}")
    url = f"data:{media_type};base64,{_text(source, 'data', path_of_source)}"
    return NamedPart(path=path, field="source.data", image_url=url)


def _text(source: Mapping[str, Any], name: str, path: str) -> str:
    value = source.get(name)
    if value is None:
        missing(f"{path}.{name}")
    if not isinstance(value, str):
        refuse(f"{path}.{name}", "must be a string")
    return value
