"""Takes the images out of the body of a request that is recorded, and puts them back. Pure.

A record is written again and again while its request runs, and has a limited size; the files are written once. Files
that were fetched from URLs are kept as well, because a gateway that continues the request must have the same image,
not what the URL returns by then.
"""

import base64
import re
from collections.abc import Mapping, Sequence

import msgspec

from antiphon.services.gateway.edge.access.kept_images import KeptImage, kept_image
from antiphon.shared.request.images import ImageInput

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
"""Start and end of the base64 of a file in a body, the file, and `BodyImage.spelling`."""


class BodyImage(msgspec.Struct, frozen=True, array_like=True):
    """A file whose base64 was at `offset` of the remaining body, which has no images.

    `spelling`: how the characters of `_SPELLINGS` were written; empty: each as itself.
    """

    offset: int
    image: KeptImage
    spelling: tuple[bytes, ...] = ()


class FetchedImage(msgspec.Struct, frozen=True, array_like=True):
    """A file that was fetched from a URL in the body."""

    url: str
    image: KeptImage


class CutBody(msgspec.Struct, frozen=True):
    """A body without its images, their places in it, the images fetched from URLs, and the files of both."""

    body: bytes
    images: tuple[BodyImage, ...]
    fetched: tuple[FetchedImage, ...]
    files: dict[KeptImage, bytes]


class WholeBody(msgspec.Struct, frozen=True):
    """A body with its images, and the files that were fetched, by URL. `is_whole`: no file is missing."""

    body: bytes
    fetched: dict[str, bytes]
    is_whole: bool


def without_images(body: bytes, images: Sequence[ImageInput]) -> CutBody:
    """Returns a body without the images that it contains as base64. `images`: those of its conversation."""
    files: dict[KeptImage, bytes] = {}
    large = {base64.b64encode(one.file): one.file for one in images if len(one.file) >= _WORTH_BYTES}
    found = _plain_in(body, large) + _escaped_in(body, large)
    left, marks, end = list[bytes](), list[BodyImage](), 0
    for first, last, file, spelling in sorted(found, key=lambda one: one[:2]):
        if first < end:
            continue  # A file whose base64 is a part of another one's.
        name = kept_image(file)
        files[name] = file
        left.append(body[end:first])
        marks.append(BodyImage(sum(map(len, left)), name, spelling))
        end = last
    fetched = {image.url: image.file for image in images if image.url and image.file}
    files |= {kept_image(file): file for file in fetched.values()}
    urls = tuple([FetchedImage(url, kept_image(file)) for url, file in fetched.items()])
    return CutBody(b"".join([*left, body[end:]]), tuple(marks), urls, files)


def whole_body(
    body: bytes,
    images: Sequence[BodyImage],
    fetched: Sequence[FetchedImage],
    files: Mapping[KeptImage, bytes],
) -> WholeBody:
    """Returns the body with its images. An image whose file is missing becomes empty."""
    parts, end = list[bytes](), 0
    for mark in images:
        encoded = base64.b64encode(files.get(mark.image, b""))
        parts += (body[end : mark.offset], _spelled(encoded, mark.spelling))
        end = mark.offset
    by_url = {one.url: files[one.image] for one in fetched if one.image in files}
    is_whole = len(by_url) == len(fetched) and all(mark.image in files for mark in images)
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
