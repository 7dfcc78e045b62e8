"""Images that requests name by URL: only from allowed hosts, at public addresses, in bounded time and size."""

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest

from antiphon.services.gateway.guests.images.remote import RemoteImages
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.security.outbound import PORTS
from antiphon.shared.security.public_addresses import is_public

PARAM = "messages[0].content[0].image_url"


class _Answer(socketserver.StreamRequestHandler):
    paths: ClassVar[list[str]] = []
    """Those of all requests, as they came."""

    def handle(self) -> None:
        path = self.rfile.readline().split()[1].decode()
        self.paths.append(path)
        answers = {
            "/image": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nimage",
            "/moved": b"HTTP/1.1 302 Found\r\nLocation: /image\r\nContent-Length: 0\r\n\r\n",
            "/away": b"HTTP/1.1 302 Found\r\nLocation: http://evil.test/image\r\nContent-Length: 0\r\n\r\n",
            "/file": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
            "/round": b"HTTP/1.1 302 Found\r\nLocation: /round\r\nContent-Length: 0\r\n\r\n",
            "/missing": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
            "/short": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nimage",
            "/shorter": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nimage",
            "/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nimage\r\n0\r\n\r\n",
            "/short-chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nimage\r\n",
            "/until-the-end": b"HTTP/1.1 200 OK\r\n\r\nimage",
            "/nowhere": b"HTTP/1.1 302 Found\r\nLocation: http://[::1\r\n\r\n",
            "/long-name": b"HTTP/1.1 302 Found\r\nLocation: http://" + b"a" * 70 + b".test/\r\n\r\n",
            "/unquoted": b"HTTP/1.1 302 Found\r\nLocation: /\xc3\xa9 \xff\r\n\r\n",
            "/%C3%A9%20%FF": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nimage",
            "/%C3%A9%20a%20b?q=%C3%BC&r=%2F+": b"HTTP/1.1 200 OK\r\nContent-Length: 005\r\n\r\nimage",
            "/large": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
        }
        if path == "/slow-body":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\npart of it")
            self.rfile.read()  # until the client hangs up
            return
        if path == "/slow":
            for _ in range(2000):
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
        monkeypatch.setitem(PORTS, "http", made.server_address[1])
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def allowed(domains: str = "images.test") -> RemoteImages:
    """Allows the test's own server, whose address is not public."""
    return RemoteImages(domains, may_connect=lambda _: True, resolve=lambda _host, _port: ["127.0.0.1"])


def refused(images: RemoteImages, url: str) -> str:
    with pytest.raises(ServiceError) as got:
        images.fetch(url, PARAM)
    assert (got.value.code, got.value.param) == ("invalid_value", PARAM)
    return got.value.message


def test_a_file_is_fetched_from_an_allowed_host(server: _Server) -> None:
    assert allowed().fetch("http://images.test/image", PARAM) == b"image"
    assert allowed(".test, other").fetch("http://IMAGES.test/moved", PARAM) == b"image"


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://images.test/é%20a b?q=ü&r=%2F+", ["/%C3%A9%20a%20b?q=%C3%BC&r=%2F+"]),
        ("http://bücher.images.test/image#top", ["/image"]),
        ("http://images.test/unquoted", ["/unquoted", "/%C3%A9%20%FF"]),
        ("http://images.test/chunks", ["/chunks"]),
        ("http://images.test/until-the-end", ["/until-the-end"]),
    ],
)
def test_a_url_may_have_characters_that_must_be_quoted(server: _Server, url: str, asked: list[str]) -> None:
    _Answer.paths.clear()
    assert allowed("images.test,.images.test").fetch(url, PARAM) == b"image"
    assert _Answer.paths == asked


@pytest.mark.parametrize("path", ["short", "shorter", "short-chunks"])
def test_a_file_that_ends_early_is_refused(server: _Server, path: str) -> None:
    message = refused(allowed(), f"http://images.test/{path}")
    assert "ended before its announced length" in message or "IncompleteRead" in message


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (f"http://{'a' * 70}.test/", "is not a URL"),
        ("http://a..test/", "is not a URL"),
        ("http://.test/", "is not a URL"),
        ("http://\ud800.test/", "is not a URL"),
        ("http://a.test/\ud800", "is not a URL"),
        ("http://a.test/nowhere", "is not a URL"),
        ("http://a.test/long-name", "is not a URL"),
        ("http://a\0.test/image", "cannot be fetched"),
        ("http://a.test:x/", "is not a URL"),
    ],
)
def test_what_is_no_url_is_refused(server: _Server, url: str, told: str) -> None:
    assert told in refused(allowed(".test"), url)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://evil.test/image", "not fetched from 'evil.test'"),
        ("http://images.test.evil.test/image", "not fetched from"),
        ("http://user@images.test/image", "no user name"),
        ("http://images.test:22/image", "usual port"),
        ("http://images.test/away", "not fetched from 'evil.test'"),
        ("http://images.test/file", "must be a URL with http"),
        ("http://images.test/round", "redirects"),
        ("http://images.test/missing", "status 404"),
        ("http://[::1/image", "is not a URL"),
    ],
)
def test_anything_else_is_refused(server: _Server, url: str, told: str) -> None:
    assert told in refused(allowed(), url)


def test_the_default_is_to_fetch_nothing() -> None:
    assert "--allowed-media-domains" in refused(RemoteImages(""), "https://example.org/image.png")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "::1", "fd00::1", "fe80::1", "fe80::1%lo",
     "0.0.0.0", "224.0.0.1", "100.64.0.1", "no address", "::ffff:10.0.0.1", "::10.0.0.1", "::ffff:0:10.0.0.1",
     "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::10.0.0.1", "2002:a00:1::1", "2001:0:a00:1::1"],
)  # fmt: skip
def test_an_address_inside_a_network_is_not_connected_to(address: str) -> None:
    assert not is_public(address)
    assert "private network" in refused(
        RemoteImages("images.test", resolve=lambda _host, _port: ["93.184.215.14", address]),
        "http://images.test/image",
    )


def test_a_public_address_is_one() -> None:
    assert is_public("93.184.215.14")
    assert is_public("2606:2800:21f::1")
    assert is_public("::ffff:93.184.215.14")
    assert is_public("64:ff9b::93.184.215.14")


def test_size_and_time_are_bounded(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IMAGE_BYTES_MAX", 1000)
    assert "more than 1000 bytes" in refused(allowed(), "http://images.test/large")
    monkeypatch.setattr(limits, "IMAGE_FETCH_S", 0.3)
    began = time.monotonic()
    assert "cannot be fetched" in refused(allowed(), "http://images.test/slow")
    assert time.monotonic() - began < 60
    message = refused(allowed(), "http://images.test/slow-body")
    assert "was not there within" in message or "cannot be fetched" in message


def test_a_host_without_an_address_is_told() -> None:
    def nothing(_host: str, _port: int) -> list[str]:
        raise socket.gaierror("no such name")

    assert "no such name" in refused(RemoteImages("images.test", resolve=nothing), "http://images.test/image")
