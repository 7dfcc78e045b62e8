"""Draws request ids: 22 letters and digits (130 bits).

An id that a client sends (`X-Request-Id`) is repeated in the response and in the usage record. The server does not use
it as its own id, because ids of sequences must be unique.
"""

import secrets
import string

LENGTH = 22
_ALPHABET = string.ascii_letters + string.digits
_NUM_USED = 256 // len(_ALPHABET) * len(_ALPHABET)
_LETTERS = bytes(ord(_ALPHABET[byte % len(_ALPHABET)]) for byte in range(256))
"""The letter of each byte."""
_UNUSED = bytes(range(_NUM_USED, 256))
"""Bytes that are left out, so that all letters are equally frequent."""
_NUM_BYTES = 32
"""Bytes that are drawn at once. Very rarely, more than ten of them are unused, and more are drawn."""


def new_id() -> str:
    """Returns a new id, unguessable and unique across gateways."""
    letters = b""
    while len(letters) < LENGTH:
        letters += secrets.token_bytes(_NUM_BYTES).translate(_LETTERS, _UNUSED)
    return letters[:LENGTH].decode()


def is_id(text: str) -> bool:
    """Whether a text may be an id: as long as one, of letters and digits."""
    return text.isascii() and text.isalnum() and len(text) == LENGTH
