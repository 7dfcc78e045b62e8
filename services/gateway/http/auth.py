"""API keys: who may use the service. Pure; `edge` asks it before anything else is done for a request.

Every route needs a key when keys are set, except the probes listed here: a new route is protected unless it is added.
"""

import hashlib
import hmac
from collections.abc import Iterable

from shared.errors import ServiceError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
_SCHEME = b"bearer"


class ApiKeys:
    """The accepted keys, as digests of equal length."""

    def __init__(self, listed: str) -> None:
        """`listed`: keys separated by commas; blanks around them and empty items do not count."""
        keys = [key.strip() for key in listed.split(",")]
        self._digests = [_digest(key.encode()) for key in keys if key]

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises ServiceError('invalid_api_key') unless the path is open or the headers carry a key."""
        if not self._digests or path in OPEN_PATHS:
            return
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != _SCHEME or not token.strip():
            raise ServiceError(
                "invalid_api_key", "You did not provide an API key: send it as 'Authorization: Bearer KEY'."
            )
        if not self._known(token.strip()):
            raise ServiceError("invalid_api_key", "Incorrect API key provided.")

    def _known(self, token: bytes) -> bool:
        # All keys are compared, each in constant time, so that timing tells neither a key nor its place in the list.
        digest = _digest(token)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
