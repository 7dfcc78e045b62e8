"""The images in the input of a response: content parts `input_image`, and the uploaded files that some parts name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from antiphon.services.gateway.apis.openai.bodies.content_blocks import check_fields
from antiphon.services.gateway.apis.openai.bodies.image_parts import tell_detail
from antiphon.services.gateway.guests.offers import UploadedFiles
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.checks import missing, refuse
from antiphon.shared.request.conversation import ContentPart, NamedPart, Turn
from antiphon.shared.request.data_urls import data_url
from antiphon.shared.request.images import ImageInput, check_file_size, is_data_url

TYPE = "input_image"
FILE_PURPOSES = ("vision", "user_data")
"""Purposes of uploaded files that may be images, as in OpenAI's API."""
_FIELDS = frozenset({"type", "image_url", "file_id", "detail"})
_NO_EFFECT = {"prompt_cache_breakpoint": None}


class FilePart(NamedPart, kw_only=True):
    """An image that is an uploaded file. `read_files` reads it."""

    file_id: str


def read(block: Mapping[str, Any], path: str) -> NamedPart:
    """Returns the image of a part `input_image`. Raises ServiceError that names the part or its member."""
    check_fields(block, _FIELDS, path, _NO_EFFECT)
    detail = block.get("detail")
    if detail is not None and not isinstance(detail, str):
        refuse(f"{path}.detail", "must be a string")
    tell_detail(detail, f"{path}.detail")
    url, file_id = block.get("image_url"), block.get("file_id")
    if file_id is not None:
        if url is not None:
            refuse(f"{path}.file_id", f"cannot be given together with '{path}.image_url'")
        if not isinstance(file_id, str):
            refuse(f"{path}.file_id", "must be the id of a file")
        return FilePart(path=path, field="file_id", file_id=file_id)
    if url is None:
        missing(f"{path}.image_url")
    if not isinstance(url, str):
        refuse(f"{path}.image_url", "must be a string: a URL or a data URL")
    return NamedPart(path=path, field="image_url", image_url=url)


def shown(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part `input_image`, which `read` has checked, as the list of input items shows it."""
    return {"type": TYPE, "detail": "auto", "file_id": block.get("file_id"), "image_url": block.get("image_url")}


def parts_of(turns: Sequence[Turn]) -> Iterator[ContentPart]:
    """Yields the images of a conversation, in order."""
    for turn in turns:
        for part in turn.content if isinstance(turn.content, list) else ():
            if isinstance(part, ContentPart) and part.type == "image_url":
                yield part


def earlier(turns: Sequence[Turn], name: str = "previous_response_id") -> list[Turn]:
    """Returns the conversation that a response continues. Errors call its images by the field that names it."""

    def named(part: int | ContentPart) -> int | ContentPart:
        if isinstance(part, int) or part.type != "image_url":
            return part
        return NamedPart(path=name, image_url=part.image_url)

    return [
        msgspec.structs.replace(turn, content=[named(part) for part in turn.content])
        if isinstance(turn.content, list)
        else turn
        for turn in turns
    ]


def keep_files(turns: Sequence[Turn], fetched: Sequence[ImageInput]) -> None:
    """Puts the files that were fetched from URLs into the turns, so that a later response has the same images.

    `fetched`: the images of all turns, in order, with their files.
    """
    for part, image in zip(parts_of(turns), fetched, strict=True):
        if not is_data_url(part.image_url):
            part.image_url = data_url(image.file)


def with_files(items: Sequence[dict[str, Any]], turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Returns the items of these turns with the images as data URLs, as far as the turns have their files."""
    urls = [part.image_url for part in parts_of(turns)]

    def block(one: Any) -> Any:
        if not isinstance(one, dict) or cast(dict[str, Any], one).get("type") != TYPE:
            return one
        url = urls.pop(0)
        return {**one, "image_url": url, "file_id": None} if is_data_url(url) else one

    changed: list[dict[str, Any]] = []
    for item in items:
        lists = {name: item[name] for name in ("content", "output") if isinstance(item.get(name), list)}
        changed.append({**item, **{name: [block(one) for one in blocks] for name, blocks in lists.items()}})
    return changed


async def read_files(turns: Sequence[Turn], files: UploadedFiles | None) -> None:
    """Puts uploaded files into the turns that name them. Raises ServiceError that names the part."""
    for part in parts_of(turns):
        if isinstance(part, FilePart):
            if files is None:
                refuse(part.param, "names an uploaded file, and this server has none")
            part.image_url = data_url(await _file(part, files))


async def _file(part: FilePart, files: UploadedFiles) -> bytes:
    try:
        found = await files.get(part.file_id)
    except ServiceError as error:
        raise ServiceError("invalid_value", f"'{part.param}': {error.message}", param=part.param) from None
    if found.purpose not in FILE_PURPOSES:
        refuse(part.param, f"must name a file with the purpose {' or '.join(map(repr, FILE_PURPOSES))}")
    check_file_size(found.bytes, part.param)
    try:
        return await files.read(part.file_id)
    except FileNotFoundError:
        refuse(part.param, "names a file that was deleted")
