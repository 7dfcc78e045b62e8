"""Text that an answer carries in a form for this system alone: reasoning that a client sends back without reading it.

APIs call it the signature of a thinking block, or the encrypted content of a reasoning item. It is no secret, because
the model's reasoning is shown to the same client on request. A checksum tells this system's texts from those of others.
Pure.
"""

import base64
import binascii
import hashlib
import zlib

from antiphon.shared import limits

_PREFIX, _CHECK_BYTES = b"an1", 8


def seal(text: str) -> str:
    """Returns the sealed form of a text: letters, digits, `-` and `_`."""
    data = zlib.compress(text.encode("utf-8", "replace"))
    return base64.urlsafe_b64encode(_PREFIX + _checksum(data) + data).decode()


def unseal(sealed: str) -> str | None:
    """Returns the text of its sealed form; None if it was not made by `seal`, or is longer than a request may be."""
    try:
        raw = base64.urlsafe_b64decode(sealed)
        head, data = raw[: len(_PREFIX) + _CHECK_BYTES], raw[len(_PREFIX) + _CHECK_BYTES :]
        if head != _PREFIX + _checksum(data):
            return None
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(data, limits.BODY_BYTES_MAX)
        return text.decode() if unpacking.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECK_BYTES]
