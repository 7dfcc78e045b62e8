"""Downloads images that requests name by URL, only from hosts that the operator has allowed.

A client's URL makes this process open a connection (a risk of SSRF), so every step is checked: the host must be on the
list, its addresses must be public, the connection goes to the address that was checked, and a redirect is followed only
if its target passes the same checks. The body is limited in bytes and time. Runs on a thread.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from urllib.parse import SplitResult, urljoin, urlsplit

from shared import limits
from shared.errors import ServiceError

REDIRECTS_MAX = 3
_CHUNK_BYTES = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
Resolve = Callable[[str, int], list[str]]


def is_public(address: str) -> bool:
    """Whether an IP address is public: neither private, loopback, link-local, nor reserved."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_global and not ip.is_multicast


def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses of a host. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class RemotePictures:
    """Fetches files from the allowed hosts.

    `may_connect` decides whether an address is allowed; by default only public ones are. `resolve` returns the
    addresses of a host.
    """

    def __init__(
        self,
        domains: str,
        *,
        may_connect: Callable[[str], bool] = is_public,
        resolve: Resolve = resolve,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        self._domains = tuple(name.strip().lower() for name in domains.split(",") if name.strip())
        self._may_connect, self._resolve = may_connect, resolve
        self._trusted = trusted

    def fetch(self, url: str, param: str) -> bytes:
        """Returns the file behind a URL. Takes up to `IMAGE_FETCH_S`. Raises ServiceError that names `param`."""
        deadline = time.monotonic() + limits.IMAGE_FETCH_S
        try:
            for _ in range(REDIRECTS_MAX + 1):
                found = self._answer(self._checked(url, param), param, deadline)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except (OSError, http.client.HTTPException) as error:
            raise _refusal(f"The picture of '{param}' cannot be fetched: {_reason(error)}.", param) from error
        raise _refusal(f"The picture of '{param}' is behind more than {REDIRECTS_MAX} redirects.", param)

    def _checked(self, url: str, param: str) -> SplitResult:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise _refusal(f"'{param}' is not a URL.", param) from None
        if parts.scheme not in _PORTS or not host or parts.username is not None:
            raise _refusal(f"'{param}' must be a URL with http or https, a host, and no user name.", param)
        if not _matches(host.lower(), self._domains):
            message = "Send the picture as a data URL, or have the server started with --allowed-media-domains."
            raise _refusal(f"Pictures are not fetched from '{host}'. {message}", param)
        if port is not None and port != _PORTS[parts.scheme]:
            raise _refusal(f"'{param}' must have the usual port of {parts.scheme}.", param)
        return parts

    def _answer(self, parts: SplitResult, param: str, deadline: float) -> bytes | str:
        """Returns the file, or the target of a redirect."""
        host = parts.hostname or ""
        connection = self._connected(host, parts.scheme, param, deadline)
        # A server that sends a byte now and then never exceeds the timeout of a read, so the whole exchange has a
        # deadline.
        end = threading.Timer(max(0.0, deadline - time.monotonic()), _hang_up, (connection.sock,))
        end.start()
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
            with contextlib.closing(connection.getresponse()) as answer:
                target = answer.getheader("Location")
                if answer.status in _REDIRECTS and target:
                    return target
                if answer.status != http.client.OK:
                    raise _refusal(f"The picture of '{param}' cannot be fetched: status {answer.status}.", param)
                return _read(connection, answer, param, deadline)
        finally:
            end.cancel()
            connection.close()

    def _connected(self, host: str, scheme: str, param: str, deadline: float) -> http.client.HTTPConnection:
        port = _PORTS[scheme]
        addresses = self._resolve(host, port)
        if not addresses or not all(map(self._may_connect, addresses)):
            raise _refusal(f"'{host}' has an address inside a private network: nothing is fetched there.", param)
        left_s = max(0.1, deadline - time.monotonic())
        # Connect to the address that was checked: another name lookup could return a different address.
        plain = socket.create_connection((addresses[0], port), left_s)
        connection = http.client.HTTPConnection(host, port, timeout=left_s)
        try:
            secured = scheme == "https"
            context = self._trusted or ssl.create_default_context()
            connection.sock = context.wrap_socket(plain, server_hostname=host) if secured else plain
        except BaseException:
            plain.close()
            raise
        return connection


def _read(
    connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, param: str, deadline: float
) -> bytes:
    found = bytearray()
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise _refusal(f"The picture of '{param}' was not there within {limits.IMAGE_FETCH_S:g} s.", param)
        if connection.sock is not None:
            connection.sock.settimeout(left_s)
        chunk = answer.read1(_CHUNK_BYTES)
        if not chunk:
            return bytes(found)
        found += chunk
        if len(found) > limits.IMAGE_BYTES_MAX:
            raise _refusal(f"The picture of '{param}' has more than {limits.IMAGE_BYTES_MAX} bytes.", param)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _matches(host: str, domains: Collection[str]) -> bool:
    return any(host == name or (name.startswith(".") and host.endswith(name)) for name in domains)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refusal(told: str, param: str) -> ServiceError:
    return ServiceError("invalid_value", told, param=param)
