"""The health check of a container: `healthcheck.py SERVICE` ends with 0, or prints a reason and ends with 1.

For a gateway, the check asks over HTTP whether it is ready. The other services have no port: the check subscribes to
heartbeats on the bus and waits for one of the service in this container, whose state must be `ready`. So a service that
hangs, has lost the bus or is still loading its model fails the check. The program implements the few necessary lines of
the NATS protocol itself, because it runs every few seconds and must start fast.
"""

import argparse
import http.client
import json
import socket
import sys
from collections.abc import Iterator
from io import BufferedRWPair
from urllib.parse import urlsplit

from antiphon.shared.bus.credentials import read_credentials, server_urls
from antiphon.shared.codec import DecodeError, Decoder
from antiphon.shared.flags import SettingsError, parse
from antiphon.shared.messages import Heartbeat
from antiphon.shared.security import tls
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.subjects import Subjects

TIMEOUT_S = 4.0
PORT = 8000


def main() -> int:
    """Runs the check and prints its result. Returns 0 if the service is ready, else 1."""
    service = sys.argv[1]
    try:
        problem = gateway() if service == "gateway" else member(service, socket.gethostname())
    except (OSError, SettingsError, DecodeError, http.client.HTTPException) as error:
        problem = str(error) or type(error).__name__
    print(problem or "ready")
    return 1 if problem else 0


def gateway() -> str:
    """Returns the reason why this container's gateway is not ready; empty if it is. Tries HTTP, then HTTPS."""
    try:
        return ask(http.client.HTTPConnection("127.0.0.1", PORT, timeout=TIMEOUT_S))
    except (http.client.RemoteDisconnected, ConnectionResetError):
        return ask(http.client.HTTPSConnection("127.0.0.1", PORT, timeout=TIMEOUT_S, context=tls.any_certificate()))


def ask(connection: http.client.HTTPConnection) -> str:
    """Returns the reason that /readyz gives why the gateway is not ready; empty if it is. Closes the connection."""
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return "" if answer.status == 200 else f"/readyz says {answer.status}: {answer.read(500).decode()}"
    finally:
        connection.close()


def member(service: str, host: str) -> str:
    """Returns the reason why this host's service is not ready; empty if its heartbeat says `ready`."""
    for heartbeat in heartbeats(service):
        if heartbeat.id.startswith(f"{service}-{host}-"):
            return "" if heartbeat.state == "ready" else f"its state is {heartbeat.state}"
    return "the bus closed the connection"


def heartbeats(service: str) -> Iterator[Heartbeat]:
    """Yields heartbeats of the service's replicas (`*`: of all services) as they arrive. Raises OSError."""
    settings = parse_settings()
    decoder = Decoder((Heartbeat,))
    host, connection = connected(server_urls(settings.nats))
    with connection:
        connection.settimeout(TIMEOUT_S)
        stream = encrypted(connection, host, settings).makefile("rwb")
        listen(stream, Subjects(settings.namespace).heartbeats(service), settings.nats_credentials)
        for payload in messages(stream):
            yield decoder.decode(payload)


def connected(urls: list[str]) -> tuple[str, socket.socket]:
    """Returns a connection to the first server that answers, and its host. Raises OSError if none does."""
    failure: OSError = ConnectionError("no NATS server is named (ANTIPHON_NATS)")
    for url in map(urlsplit, urls):
        host = url.hostname or ""
        try:
            return host, socket.create_connection((host, url.port or 4222), TIMEOUT_S / len(urls))
        except OSError as error:
            failure = error
    raise failure


def parse_settings() -> BusSettings:
    """Returns the settings of the bus, from the same environment variables that the service reads."""
    return parse(BusSettings, argparse.Namespace())


def encrypted(connection: socket.socket, host: str, settings: BusSettings) -> socket.socket:
    """Reads the server's first line, and then switches to TLS if the settings require it."""
    line = b""
    while not line.endswith(b"\n") and (byte := connection.recv(1)):
        line += byte
    context = tls.bus_context(settings)
    return connection if context is None else context.wrap_socket(connection, server_hostname=host)


def listen(stream: BufferedRWPair, subject: str, credentials: str) -> None:
    """Sends the NATS handshake and subscribes to `subject`."""
    user, password = read_credentials(credentials) if credentials else ("", "")
    about = {"verbose": False, "pedantic": False, "lang": "python", "version": "0", "name": "healthcheck"}
    about |= {"user": user, "pass": password} if user else {}
    stream.write(f"CONNECT {json.dumps(about)}\r\nSUB {subject} 1\r\n".encode())
    stream.flush()


def messages(stream: BufferedRWPair) -> Iterator[bytes]:
    """Yields payloads as they arrive. Raises OSError if the server refuses, TimeoutError after `TIMEOUT_S` seconds."""
    while line := stream.readline():
        verb = line.split(b" ", 1)[0].strip()
        if verb == b"MSG":
            yield stream.read(int(line.split()[-1]))
            stream.readline()
        elif verb == b"PING":
            stream.write(b"PONG\r\n")
            stream.flush()
        elif verb == b"-ERR":
            raise ConnectionError(line.decode().strip())


if __name__ == "__main__":
    sys.exit(main())
