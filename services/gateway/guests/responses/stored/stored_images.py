"""Takes the files of images out of records of responses and conversations, and puts them back. Pure.

A conversation continues over many responses, and each of their records has the whole conversation. If the records had
the files, an image would be stored twice for each response.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from antiphon.services.gateway.edge.access.kept_images import KeptImage, kept_image
from antiphon.services.gateway.guests.responses import images
from antiphon.services.gateway.guests.responses.input_items import Item
from antiphon.shared.errors import ServiceError
from antiphon.shared.request.conversation import ContentPart, Turn
from antiphon.shared.request.images import is_data_url, read_image_url

_REFERENCE = "image"
_Change = Callable[[str], str]


class _Taken:
    """The files that are taken out of one record."""

    def __init__(self) -> None:
        self.files: dict[KeptImage, bytes] = {}
        self._references: dict[str, str] = {}

    def reference(self, url: str) -> str:
        """Returns what takes the place of a URL."""
        if not is_data_url(url):
            return url
        if url not in self._references:
            try:
                file = read_image_url(url, images.TYPE).file
            except ServiceError:
                return url  # It is of a response that failed because the bus had lost its image.
            name = kept_image(file)
            self.files[name] = file
            self._references[url] = f"{_REFERENCE}:{name.digest}:{name.size}:{url.partition(',')[0]}"
        return self._references[url]


def taken_out(
    items: Sequence[Item], turns: Sequence[Turn] = ()
) -> tuple[list[Item], list[Turn], dict[KeptImage, bytes]]:
    """Returns a record's items and turns with a reference in place of each data URL, and the files of these URLs."""
    taken = _Taken()
    return *_changed(items, turns, taken.reference), taken.files


def names_in(items: Sequence[Item], turns: Sequence[Turn] = ()) -> list[KeptImage]:
    """Returns the images to which stored items and turns refer."""
    found: list[KeptImage] = []

    def noted(url: str) -> str:
        if (named := _named(url)) is not None:
            found.append(named[0])
        return url

    _changed(items, turns, noted)
    return found


def put_back(
    items: Sequence[Item], turns: Sequence[Turn], files: Mapping[KeptImage, bytes], whose: str
) -> tuple[list[Item], list[Turn]]:
    """Returns items and turns as they were before `taken_out`. `whose`: to whom the images belong, for the error.

    Raises ServiceError('not_found') if a file is missing.
    """
    urls: dict[str, str] = {}

    def whole(url: str) -> str:
        named = _named(url)
        if named is None:
            return url
        if url not in urls:
            name, head = named
            if name not in files:
                told = f"An image of the {whose} is not stored any more. Send the conversation again."
                raise ServiceError("not_found", told, param="response_id")
            urls[url] = f"{head},{base64.b64encode(files[name]).decode()}"
        return urls[url]

    return _changed(items, turns, whole)


def _named(url: str) -> tuple[KeptImage, str] | None:
    """Returns the image of a reference, and the beginning of its data URL; None if `url` is not a reference."""
    kind, _, rest = url.partition(":")
    if kind != _REFERENCE:
        return None
    digest, size, head = rest.split(":", 2)
    return KeptImage(digest, int(size)), head


def _changed(items: Sequence[Item], turns: Sequence[Turn], change: _Change) -> tuple[list[Item], list[Turn]]:
    return [_item(item, change) for item in items], [_turn(turn, change) for turn in turns]


def _item(item: Item, change: _Change) -> Item:
    changed = {
        field: [_block(block, change) for block in item[field]]
        for field in ("content", "output")
        if isinstance(item.get(field), list)
    }
    return {**item, **changed}


def _block(block: dict[str, Any], change: _Change) -> dict[str, Any]:
    url = block.get("image_url")
    return {**block, "image_url": change(url)} if block["type"] == images.TYPE and isinstance(url, str) else block


def _turn(turn: Turn, change: _Change) -> Turn:
    if not isinstance(turn.content, list):
        return turn

    def changed(part: int | ContentPart) -> int | ContentPart:
        if isinstance(part, int) or not isinstance(part.image_url, str):
            return part
        return ContentPart(type=part.type, image_url=change(part.image_url))

    return msgspec.structs.replace(turn, content=[changed(part) for part in turn.content])
