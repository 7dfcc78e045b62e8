"""Which requests are accepted from browsers, in which pages of strangers run next to the user's own. Pure.

A server without API keys trusts whoever reaches it. With a server on the user's machine, that could be any web page
that the user opens, in two ways:

- The page sends requests to `http://127.0.0.1:8000`, which do something even if the page may not read the answers. But
  a browser says where a request comes from: `Origin`, or else `Sec-Fetch-Site`.
- The page's name is made to resolve to 127.0.0.1 (DNS rebinding). Then the page and the server have one origin, and the
  page reads the answers. But `Host` still has the page's name. It cannot be an address, because the page needs a name
  that resolves to something else first.

Programs other than browsers send neither `Origin` nor `Sec-Fetch-Site`, and a `Host` under which the user reaches the
server. With API keys only the routes of administrators have these rules: no page of a stranger has a key.
"""

import ipaddress
import socket
from collections.abc import Mapping
from functools import lru_cache

from antiphon.services.gateway.edge.http.auth import OPEN_PATHS, is_for_admins, is_page
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import json_words

_CONTAINER_NAMES = frozenset({"host.docker.internal", "host.containers.internal"})
"""Names by which containers of Docker and Podman reach their host. No name server of the Internet knows them."""
_PROGRAMS = frozenset({"app", "file", "tauri", "vscode-webview", "vscode-file"})
"""Schemes of pages that belong to programs on the user's machine. A page from the network has none of them. The origin
of a sandboxed frame, also of a stranger, is `null`, which is refused."""
_EXTENSIONS = frozenset({"chrome-extension", "moz-extension", "safari-web-extension"})
"""Schemes of the pages of browser extensions, which the user has installed."""
_PORTS = {"http": 80, "https": 443}
"""Ports that a browser leaves out of an origin."""
_SHOWN_CHARS = 100
"""Characters of a client's header that an error message repeats."""


class BrowserRules:
    """The rules of one server. `has_keys`: requests need an API key."""

    def __init__(self, settings: GatewaySettings, *, has_keys: bool) -> None:
        self._has_keys = has_keys
        hosts = [one.lower() for one in json_words(settings.allowed_hosts) or ()]
        own = socket.gethostname().lower()
        self._hosts = {settings.host.lower(), own, f"{own}.local", *_CONTAINER_NAMES, *hosts}
        self._origins = set(json_words(settings.allowed_origins) or ())

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises ServiceError if a request may be one of a stranger's page. `path`: without a proxy's prefix."""
        if path in OPEN_PATHS or (self._has_keys and not is_for_admins(path)):
            return
        host, origin, site = headers.get(b"host", b""), headers.get(b"origin"), headers.get(b"sec-fetch-site")
        self._check_host(host)
        if origin is not None:
            self._check_origin(origin, host, site)
        elif site in (b"cross-site", b"same-site") and not (is_page(path) and _is_navigation(method, headers)):
            raise _refusal("Pages of other sites may not use this server, unless --allowed-origins names them.")
        if (origin is not None or site is not None) and _has_body(headers):
            _check_type(headers.get(b"content-type", b""))

    def _check_host(self, host: bytes) -> None:
        name = _name(host)
        if name and not (_is_address(name) or _is_local(name) or name in self._hosts or "*" in self._hosts):
            shown = name[:_SHOWN_CHARS]
            raise _refusal(
                f"This server does not answer at the name '{shown}', which a stranger's page could have. If it is "
                f"yours, start the server with --allowed-hosts='[\"{shown}\"]'."
            )

    def _check_origin(self, origin: bytes, host: bytes, site: bytes | None) -> None:
        text = origin.decode("latin-1")
        scheme, _, authority = text.lower().partition("://")
        if "*" in self._origins or text in self._origins or scheme in _PROGRAMS or scheme in _EXTENSIONS:
            return
        if scheme in _PORTS:
            own = host.decode("latin-1").lower() in (authority, f"{authority}:{_PORTS[scheme]}")
            # A proxy may have replaced the host, but the browser knows which one it was.
            if own or site == b"same-origin" or _is_local(_name(authority.encode("latin-1"))):
                return
        shown = text[:_SHOWN_CHARS]
        raise _refusal(
            f"Pages of '{shown}' may not use this server. If they are yours, start the server with "
            f"--allowed-origins='[\"{shown}\"]'."
        )


def _refusal(message: str) -> ServiceError:
    return ServiceError("permission_denied", message)


def _check_type(content_type: bytes) -> None:
    """Checks the type of a browser's body: for a type of HTML forms, the browser does not ask for permission (CORS).

    Other programs may leave the type out, as curl does in Ollama's documentation. Forms with files are uploads; they
    are no JSON, so other routes refuse them.
    """
    kind = content_type.partition(b";")[0].strip().lower()
    is_json = kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))
    if not is_json and kind != b"multipart/form-data":
        raise ServiceError("invalid_value", "A browser must send 'Content-Type: application/json'.")


def _has_body(headers: Mapping[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _is_navigation(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the user has followed a link: the page is shown on its own, not within another one."""
    kind = (method, headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest"))
    return kind == ("GET", b"navigate", b"document")


@lru_cache(maxsize=256)
def _name(host: bytes) -> str:
    """Returns the name or address of a `Host`, without its port."""
    text = host.decode("latin-1").strip().lower()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0].removesuffix(".")


@lru_cache(maxsize=256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=256)
def _is_local(name: str) -> bool:
    """Whether a name or address always means this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return _is_address(name) and (ipaddress.ip_address(name).is_loopback or name in ("0.0.0.0", "::"))
