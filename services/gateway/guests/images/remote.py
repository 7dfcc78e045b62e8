"""Downloads images that requests name by URL, only from hosts that the operator has allowed.

A client's URL makes this process open a connection (a risk of SSRF), so every step is checked: the host must be on the
list, its addresses must be public, the connection goes to the address that was checked, and a redirect is followed only
if its target passes the same checks. The body is limited in bytes and time, and must be complete. Runs on a thread.
"""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import quote, urljoin

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.security.outbound import KEPT, PORTS, PrivateAddressError, Target, connected, target_of
from antiphon.shared.security.public_addresses import Resolve, is_listed, is_public, listed, resolve

REDIRECTS_MAX = 3
_CHUNK_BYTES = 64 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)


class RemoteImages:
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
    ) -> None:
        self._domains = listed(domains)
        self._may_connect, self._resolve = may_connect, resolve

    def fetch(self, url: str, param: str) -> bytes:
        """Returns the file behind a URL. Takes up to `IMAGE_FETCH_S`. Raises ServiceError that names `param`."""
        deadline = time.monotonic() + limits.IMAGE_FETCH_S
        try:
            for _ in range(REDIRECTS_MAX + 1):
                found = self._answer(self._checked(url, param), param, deadline)
                if isinstance(found, bytes):
                    return found
                url = _joined(url, found, param)
        except (OSError, http.client.HTTPException) as error:
            raise _refusal(f"The image of '{param}' cannot be fetched: {_reason(error)}.", param) from error
        raise _refusal(f"The image of '{param}' is behind more than {REDIRECTS_MAX} redirects.", param)

    def _checked(self, url: str, param: str) -> Target:
        try:
            target = target_of(url)
        except ValueError as error:
            raise _refusal(f"'{param}' {error}.", param) from None
        if not is_listed(target.name, self._domains):
            message = "Send the image as a data URL, or have the server started with --allowed-media-domains."
            raise _refusal(f"Images are not fetched from '{target.name}'. {message}", param)
        if target.port != PORTS[target.scheme]:
            raise _refusal(f"'{param}' must have the usual port of {target.scheme}.", param)
        return target

    def _answer(self, target: Target, param: str, deadline: float) -> bytes | str:
        """Returns the file, or where a redirect leads."""
        try:
            connection = connected(target, deadline, self._may_connect, self._resolve)
        except PrivateAddressError as error:
            raise _refusal(f"{error}: nothing is fetched there.", param) from error
        # A server that sends a byte now and then never exceeds the timeout of a read, so the whole exchange has a
        # deadline.
        late = threading.Event()
        end = threading.Timer(max(0.0, deadline - time.monotonic()), _hang_up, (connection.sock, late))
        end.start()
        try:
            connection.request("GET", target.path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
            with contextlib.closing(connection.getresponse()) as answer:
                location = answer.getheader("Location")
                if answer.status in _REDIRECTS and location:
                    return location
                if answer.status != http.client.OK:
                    raise _refusal(f"The image of '{param}' cannot be fetched: status {answer.status}.", param)
                return _read(connection, answer, param, deadline, late)
        finally:
            end.cancel()
            connection.close()


def _read(
    connection: http.client.HTTPConnection,
    answer: http.client.HTTPResponse,
    param: str,
    deadline: float,
    late: threading.Event,
) -> bytes:
    """Returns the body. `late` is set when the connection was ended at the deadline."""
    found = bytearray()
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or late.is_set():
            raise _refusal(f"The image of '{param}' was not there within {limits.IMAGE_FETCH_S:g} s.", param)
        if connection.sock is not None:
            connection.sock.settimeout(left_s)
        chunk = answer.read1(_CHUNK_BYTES)
        if not chunk and not late.is_set():
            if not _is_complete(answer, len(found)):
                raise _refusal(f"The image of '{param}' ended before its announced length.", param)
            return bytes(found)
        found += chunk
        if len(found) > limits.IMAGE_BYTES_MAX:
            raise _refusal(f"The image of '{param}' has more than {limits.IMAGE_BYTES_MAX} bytes.", param)


def _is_complete(answer: http.client.HTTPResponse, size: int) -> bool:
    """Whether a body has the length that its header gives. The library checks bodies in chunks."""
    told = answer.getheader("Content-Length", "").strip()
    if answer.getheader("Transfer-Encoding") or not told.isdecimal():
        return True
    return told.lstrip("0") == str(size or "")


def _hang_up(sock: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _joined(url: str, location: str, param: str) -> str:
    """Returns the URL of a redirect. `location`: the header, in which the library has made each byte one character."""
    try:
        return urljoin(url, quote(location.encode("latin-1"), KEPT))
    except ValueError:
        raise _refusal(f"'{param}' is not a URL.", param) from None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refusal(told: str, param: str) -> ServiceError:
    return ServiceError("invalid_value", told, param=param)
