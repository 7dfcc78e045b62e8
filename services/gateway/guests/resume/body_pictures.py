"""Takes the pictures out of the body of a request that is recorded, and puts them back. Pure.

A record is written again and again while its request runs, and has a limited size; the files are written once. Files
that were fetched from URLs are kept as well, because a gateway that continues the request must have the same picture,
not what the URL returns by then.
"""

import base64
import re
from collections.abc import Mapping, Sequence

import msgspec

from services.gateway.edge.access.kept_pictures import KeptPicture, kept_picture
from shared.request.pictures import PictureInput

_WORTH_BYTES = 1024
"""Size from which a file is taken out, bytes."""
_SPELLINGS = (
    (b"/", b"\\/", b"\\u002f", b"\\u002F"),
    (b"+", b"\\u002b", b"\\u002B"),
    (b"=", b"\\u003d", b"\\u003D"),
)
"""How writers of JSON spell the characters of base64 that some of them escape: PHP escapes `/`, .NET `+`, Gson `=`. The
first spelling of each is the character itself.
"""
_ESCAPED = re.compile(rb"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/=]++|\\/|\\u00(?:2[fFbB]|3[dD]))++")
"""A run of the characters of base64, each as itself or escaped. Matching takes time in proportion to the size of the
body."""
_Found = list[tuple[int, int, bytes, tuple[bytes, ...]]]
"""Start and end of the base64 of a file in a body, the file, and `BodyPicture.spelling`."""


class BodyPicture(msgspec.Struct, frozen=True, array_like=True):
    """A file whose base64 was at `offset` of the remaining body, which has no pictures.

    `spelling`: how the characters of `_SPELLINGS` were written; empty: each as itself.
    """

    offset: int
    picture: KeptPicture
    spelling: tuple[bytes, ...] = ()


class FetchedPicture(msgspec.Struct, frozen=True, array_like=True):
    """A file that was fetched from a URL in the body."""

    url: str
    picture: KeptPicture


class CutBody(msgspec.Struct, frozen=True):
    """A body without its pictures, their places in it, the pictures fetched from URLs, and the files of both."""

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
    """Returns a body without the pictures that it contains as base64. `pictures`: those of its conversation."""
    files: dict[KeptPicture, bytes] = {}
    large = {base64.b64encode(one.file): one.file for one in pictures if len(one.file) >= _WORTH_BYTES}
    found = _plain_in(body, large) + _escaped_in(body, large)
    left, marks, end = list[bytes](), list[BodyPicture](), 0
    for first, last, file, spelling in sorted(found, key=lambda one: one[:2]):
        if first < end:
            continue  # A file whose base64 is a part of another one's.
        name = kept_picture(file)
        files[name] = file
        left.append(body[end:first])
        marks.append(BodyPicture(sum(map(len, left)), name, spelling))
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
    """Returns the body with its pictures. A picture whose file is missing becomes empty."""
    parts, end = list[bytes](), 0
    for mark in pictures:
        encoded = base64.b64encode(files.get(mark.picture, b""))
        parts += (body[end : mark.offset], _spelled(encoded, mark.spelling))
        end = mark.offset
    by_url = {one.url: files[one.picture] for one in fetched if one.picture in files}
    is_whole = len(by_url) == len(fetched) and all(mark.picture in files for mark in pictures)
    return WholeBody(b"".join([*parts, body[end:]]), by_url, is_whole)


def _plain_in(body: bytes, files: Mapping[bytes, bytes]) -> _Found:
    """Finds the places where the body has the base64 of a file, without escapes. `files`: by their base64."""
    found: _Found = []
    for encoded, file in files.items():
        start = 0
        while (start := body.find(encoded, start)) >= 0:
            found.append((start, start + len(encoded), file, ()))
            start += len(encoded)
    return found


def _escaped_in(body: bytes, files: Mapping[bytes, bytes]) -> _Found:
    """As `_plain_in`, but with escapes. A character must be escaped in the same way throughout a file."""
    if not files or not any(escape in body for _, *escapes in _SPELLINGS for escape in escapes):
        return []
    found: _Found = []
    for run in _ESCAPED.finditer(body):
        text = run.group()
        if len(text) < _WORTH_BYTES or b"\\" not in text:
            continue
        spelling = tuple([next((one for one in escapes if one in text), plain) for plain, *escapes in _SPELLINGS])
        encoded = text
        for (plain, *_), written in zip(_SPELLINGS, spelling, strict=True):
            encoded = encoded.replace(written, plain)
        if encoded in files and _spelled(encoded, spelling) == text:
            found.append((run.start(), run.end(), files[encoded], spelling))
    return found


def _spelled(encoded: bytes, spelling: Sequence[bytes]) -> bytes:
    for (plain, *_), written in zip(_SPELLINGS, spelling, strict=False):
        encoded = encoded.replace(plain, written)
    return encoded
