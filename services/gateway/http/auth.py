"""Checks API keys. Pure; called by `edge` before any other work for a request.

If keys are set, every route needs a key, except the probes in `OPEN_PATHS`. So a new route is protected by default.
"""

import hashlib
import hmac
from collections.abc import Iterable

from shared.errors import ServiceError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
_SCHEME = b"bearer"
_KEY_HEADER = b"x-api-key"
"""The header in which clients of Anthropic's API send the key."""


class ApiKeys:
    """The accepted keys, kept as digests of equal length."""

    def __init__(self, listed: str) -> None:
        """`listed`: keys separated by commas. Spaces around a key and empty items are ignored."""
        keys = [key.strip() for key in listed.split(",")]
        self._digests = [_digest(key.encode()) for key in keys if key]

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises ServiceError('invalid_api_key') if keys are set, the path is not open, and the headers have no key."""
        if not self._digests or path in OPEN_PATHS:
            return
        token = _token(headers)
        if not token:
            raise ServiceError(
                "invalid_api_key", "You did not provide an API key: send it as 'Authorization: Bearer KEY'."
            )
        if not self._known(token):
            raise ServiceError("invalid_api_key", "Incorrect API key provided.")

    def _known(self, token: bytes) -> bool:
        # Compares all keys, each in constant time, so that timing reveals neither a key nor its position in the list.
        digest = _digest(token)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _token(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the key that a request carries, b"" if there is none. A bearer token has precedence over `x-api-key`."""
    given = {name: value for name, value in headers if name in (b"authorization", _KEY_HEADER)}
    scheme, _, token = given.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == _SCHEME and token.strip() else given.get(_KEY_HEADER, b"").strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
