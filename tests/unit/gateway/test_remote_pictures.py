"""Pictures that requests name by URL: only from allowed hosts, at public addresses, in bounded time and size."""

import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from services.gateway.pictures import remote
from services.gateway.pictures.remote import RemotePictures, is_public
from shared import limits
from shared.errors import ServiceError

PARAM = "messages[0].content[0].image_url"


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        path = self.rfile.readline().split()[1].decode()
        answers = {
            "/picture": b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\npicture",
            "/moved": b"HTTP/1.1 302 Found\r\nLocation: /picture\r\nContent-Length: 0\r\n\r\n",
            "/away": b"HTTP/1.1 302 Found\r\nLocation: http://evil.test/picture\r\nContent-Length: 0\r\n\r\n",
            "/file": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
            "/round": b"HTTP/1.1 302 Found\r\nLocation: /round\r\nContent-Length: 0\r\n\r\n",
            "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
            "/large": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
        }
        if path == "/slow":
            for _ in range(100):
                self.wfile.write(b"H")
                time.sleep(0.05)
            return
        self.wfile.write(answers[path])


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """The client of a slow answer hangs up."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Answer) as made:
        monkeypatch.setitem(remote._PORTS, "http", made.server_address[1])
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def allowed(domains: str = "pictures.test") -> RemotePictures:
    """Allows the test's own server, whose address is not public."""
    return RemotePictures(domains, may_connect=lambda _: True, resolve=lambda _host, _port: ["127.0.0.1"])


def refused(pictures: RemotePictures, url: str) -> str:
    with pytest.raises(ServiceError) as got:
        pictures.fetch(url, PARAM)
    assert (got.value.code, got.value.param) == ("invalid_value", PARAM)
    return got.value.message


def test_a_file_is_fetched_from_an_allowed_host(server: _Server) -> None:
    assert allowed().fetch("http://pictures.test/picture", PARAM) == b"picture"
    assert allowed(".test, other").fetch("http://PICTURES.test/moved", PARAM) == b"picture"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://evil.test/picture", "not fetched from 'evil.test'"),
        ("http://pictures.test.evil.test/picture", "not fetched from"),
        ("http://user@pictures.test/picture", "no user name"),
        ("http://pictures.test:22/picture", "usual port"),
        ("http://pictures.test/away", "not fetched from 'evil.test'"),
        ("http://pictures.test/file", "must be a URL with http"),
        ("http://pictures.test/round", "redirects"),
        ("http://pictures.test/missing", "status 404"),
        ("http://[::1/picture", "is not a URL"),
    ],
)
def test_anything_else_is_refused(server: _Server, url: str, told: str) -> None:
    assert told in refused(allowed(), url)


def test_the_default_is_to_fetch_nothing() -> None:
    assert "--allowed-media-domains" in refused(RemotePictures(""), "https://example.org/picture.png")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "::1", "fd00::1", "fe80::1", "::ffff:10.0.0.1",
     "0.0.0.0", "224.0.0.1", "100.64.0.1", "no address"],
)  # fmt: skip
def test_an_address_inside_a_network_is_not_connected_to(address: str) -> None:
    assert not is_public(address)
    assert "private network" in refused(
        RemotePictures("pictures.test", resolve=lambda _host, _port: ["93.184.215.14", address]),
        "http://pictures.test/picture",
    )


def test_a_public_address_is_one() -> None:
    assert is_public("93.184.215.14")
    assert is_public("2606:2800:21f::1")


def test_size_and_time_are_bounded(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IMAGE_BYTES_MAX", 1000)
    assert "more than 1000 bytes" in refused(allowed(), "http://pictures.test/large")
    monkeypatch.setattr(limits, "IMAGE_FETCH_S", 0.3)
    began = time.monotonic()
    assert "cannot be fetched" in refused(allowed(), "http://pictures.test/slow")
    assert time.monotonic() - began < 3


def test_a_host_without_an_address_is_told() -> None:
    def nothing(_host: str, _port: int) -> list[str]:
        raise socket.gaierror("no such name")

    assert "no such name" in refused(RemotePictures("pictures.test", resolve=nothing), "http://pictures.test/picture")
