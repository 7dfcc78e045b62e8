"""Ids of requests: 22 letters and digits (130 bits) drawn by the server; a client's own id is never taken over."""

import secrets
import string

LENGTH = 22
_ALPHABET = string.ascii_letters + string.digits
_BITS = 136


def new_id() -> str:
    """A fresh id, unguessable and unique across gateways."""
    number, letters = secrets.randbits(_BITS), ""
    for _ in range(LENGTH):
        number, digit = divmod(number, len(_ALPHABET))
        letters += _ALPHABET[digit]
    return letters
