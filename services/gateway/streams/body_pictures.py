"""Takes the pictures out of the body of a request that is recorded, and puts them back. Pure.

A record is written again and again while its request runs, and has a limited size; the files are written once. Those
that were fetched are kept as well: whoever goes on with the request must have the same picture, not what is behind the
URL then.
"""

import base64
from collections.abc import Mapping, Sequence

import msgspec

from services.gateway.pictures.kept import KeptPicture, kept_picture
from shared.request.pictures import PictureInput

_WORTH_BYTES = 1024
"""Size from which a file is taken out."""


class BodyPicture(msgspec.Struct, frozen=True, array_like=True):
    """A file whose base64 was at `offset` of what is left of the body."""

    offset: int
    picture: KeptPicture


class FetchedPicture(msgspec.Struct, frozen=True, array_like=True):
    """A file that was fetched from a URL in the body."""

    url: str
    picture: KeptPicture


class CutBody(msgspec.Struct, frozen=True):
    """A body without its pictures, where these were, what was fetched, and the files of both."""

    body: bytes
    pictures: tuple[BodyPicture, ...]
    fetched: tuple[FetchedPicture, ...]
    files: dict[KeptPicture, bytes]


class WholeBody(msgspec.Struct, frozen=True):
    """A body with its pictures, and the files that were fetched, by URL. `is_whole`: no file is missing."""

    body: bytes
    fetched: dict[str, bytes]
    is_whole: bool


def without_pictures(body: bytes, pictures: Sequence[PictureInput]) -> CutBody:
    """Returns a body without those of the pictures of its conversation that are in it as unescaped base64."""
    found: list[tuple[int, int, KeptPicture]] = []
    files: dict[KeptPicture, bytes] = {}
    for file in {picture.file for picture in pictures if len(picture.file) >= _WORTH_BYTES}:
        text, start = base64.b64encode(file), 0
        while (start := body.find(text, start)) >= 0:
            name = kept_picture(file)
            files[name] = file
            found.append((start, start + len(text), name))
            start += len(text)
    left, marks, end = list[bytes](), list[BodyPicture](), 0
    for first, last, name in sorted(found, key=lambda one: one[:2]):
        if first < end:
            continue  # A file whose base64 is a part of another one's.
        left.append(body[end:first])
        marks.append(BodyPicture(sum(map(len, left)), name))
        end = last
    fetched = {picture.url: picture.file for picture in pictures if picture.url and picture.file}
    files |= {kept_picture(file): file for file in fetched.values()}
    urls = tuple([FetchedPicture(url, kept_picture(file)) for url, file in fetched.items()])
    return CutBody(b"".join([*left, body[end:]]), tuple(marks), urls, files)


def whole_body(
    body: bytes,
    pictures: Sequence[BodyPicture],
    fetched: Sequence[FetchedPicture],
    files: Mapping[KeptPicture, bytes],
) -> WholeBody:
    """Returns the body with its pictures. Those whose files are missing are empty."""
    parts, end = list[bytes](), 0
    for mark in pictures:
        parts += (body[end : mark.offset], base64.b64encode(files.get(mark.picture, b"")))
        end = mark.offset
    by_url = {one.url: files[one.picture] for one in fetched if one.picture in files}
    is_whole = len(by_url) == len(fetched) and all(mark.picture in files for mark in pictures)
    return WholeBody(b"".join([*parts, body[end:]]), by_url, is_whole)
