"""Finds the API key of a request and checks that it may use the route. Called by `edge` before any other work.

If keys are set, every route needs a key, except the probes in `OPEN_PATHS` and the files of the console, which asks for
the key. So a new route is protected by default.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence

from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.security.api_keys import ANONYMOUS, ApiKey, Scope, digest, launcher_keys, listed_keys

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/.well-known/antiphon-keys"})
"""Paths that need no key: the probes, and the public keys by which anybody checks a receipt."""
_CONSOLE_PATH, _CONSOLE_PREFIX = "/", "/console/"
_ADMIN_PATHS = frozenset(
    {
        *("/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/sleep", "/wake_up", "/is_sleeping"),
    }
)
_ADMIN_PREFIX = "/admin/"
_DOCUMENTS = frozenset({"/version", "/docs", "/openapi.json"})
"""Paths that any key may read."""
_SCHEME = b"bearer"
_KEY_HEADER = b"x-api-key"
"""The header in which clients of Anthropic's API send the key."""


class ApiKeys:
    """The accepted API keys: keys of the list have no restrictions; keys of the key file have limits and scopes."""

    def __init__(self, listed: str, file_keys: Sequence[ApiKey] | None = None, launcher_key: str = "") -> None:
        """`listed`: keys separated by commas. `file_keys`: keys of a key file; None: there is no key file.

        `launcher_key`: an additional key, used by the launcher that started this process; "": none.

        Raises SettingsError if a key of the file has the name or the value of a listed one.
        """
        self._listed = [*listed_keys(listed), *launcher_keys(launcher_key)]
        self._secret = secrets.token_bytes(32)
        self.are_needed = bool(self._listed) or file_keys is not None
        self._keys: dict[bytes, ApiKey] = {}
        self._by_name: dict[str, ApiKey] = {}
        self.replace(file_keys or ())

    def replace(self, file_keys: Sequence[ApiKey]) -> None:
        """Replaces the keys of the key file. Raises SettingsError like the constructor; then the former keys stay."""
        names = {key.name for key in self._listed}
        keys = {self._slot(value): key for key in self._listed for value in key.digests}
        for key in file_keys:
            slots = {self._slot(value) for value in key.digests}
            if key.name in names or not keys.keys().isdisjoint(slots):
                raise SettingsError(
                    f"--api-keys-file: the key {key.name!r} has the name or the value of a key of --api-keys"
                )
            keys |= dict.fromkeys(slots, key)
        self._keys = keys
        self._by_name = {key.name: key for key in keys.values()}

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> ApiKey:
        """Returns the key of a request; ANONYMOUS if no keys are set or the path is open.

        Raises ServiceError: 'invalid_api_key' without a known key, 'permission_denied' if the key's scopes do not
        include the route.
        """
        if not self.are_needed or path in OPEN_PATHS or _is_of_console(path):
            return ANONYMOUS
        token = _token(headers)
        if not token:
            raise ServiceError(
                "invalid_api_key", "You did not provide an API key: send it as 'Authorization: Bearer KEY'."
            )
        key = self._find(token)
        if key is None:
            raise ServiceError("invalid_api_key", "Incorrect API key provided.")
        _check_scope(key, path)
        return key

    def named(self, name: str, path: str) -> ApiKey:
        """Returns the current key with this name, for work on its behalf; ANONYMOUS if no keys are set.

        Raises ServiceError: 'invalid_api_key' if there is no such key, 'permission_denied' as `check` does.
        """
        if not self.are_needed:
            return ANONYMOUS
        key = self._by_name.get(name)
        if key is None:
            message = "without an API key, and the server needs one now"
            if name != ANONYMOUS.name:
                message = f"with the API key {name!r}, which does not exist any more"
            raise ServiceError("invalid_api_key", f"The work was started {message}.")
        _check_scope(key, path)
        return key

    def _find(self, token: bytes) -> ApiKey | None:
        value = digest(token)
        key = self._keys.get(self._slot(value))
        # The table is searched by a hash under a secret of this process, so the time of the search tells nothing about
        # the keys; the digests are then compared in constant time.
        if key is None or sum(hmac.compare_digest(value, known) for known in key.digests) == 0:
            return None
        return key

    def _slot(self, value: bytes) -> bytes:
        return hashlib.blake2b(value, key=self._secret, digest_size=32).digest()


def is_for_admins(path: str) -> bool:
    """Whether a route needs the scope `admin`."""
    return path in _ADMIN_PATHS or path.startswith(_ADMIN_PREFIX)


def is_page(path: str) -> bool:
    """Whether a path is one that people open in a browser: the console or a document."""
    return _is_of_console(path) or path in _DOCUMENTS


def _is_of_console(path: str) -> bool:
    return path == _CONSOLE_PATH or path.startswith(_CONSOLE_PREFIX)


def _check_scope(key: ApiKey, path: str) -> None:
    scope = _scope_of(path)
    if scope is not None and scope not in key.scopes:
        raise ServiceError(
            "permission_denied", f"The API key {key.name!r} may not use {path}: it lacks the scope {scope!r}."
        )


def _scope_of(path: str) -> Scope | None:
    """Returns the scope that a route needs; None: any key will do."""
    if is_for_admins(path):
        return "admin"
    return None if path in _DOCUMENTS else "inference"


def _token(headers: Mapping[bytes, bytes]) -> bytes:
    """Returns the key that a request carries, b"" if there is none. A bearer token has precedence over `x-api-key`."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == _SCHEME and token.strip() else headers.get(_KEY_HEADER, b"").strip()
