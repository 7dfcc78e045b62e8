"""Draws request ids: 22 letters and digits (130 bits).

An id that a client sends (`X-Request-Id`) is repeated in the response and in the usage record. The server does not use
it as its own id, because ids of sequences must be unique.
"""

import secrets
import string

LENGTH = 22
_ALPHABET = string.ascii_letters + string.digits
_BITS = 136


def new_id() -> str:
    """Returns a new id, unguessable and unique across gateways."""
    number, letters = secrets.randbits(_BITS), ""
    for _ in range(LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        letters += _ALPHABET[digit]
    return letters


def is_id(text: str) -> bool:
    """Whether a text may be an id: as long as one, of letters and digits."""
    return text.isascii() and text.isalnum() and len(text) == LENGTH
