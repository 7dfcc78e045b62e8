"""Is the service of this container well? `healthcheck.py SERVICE` ends with 0 or says why not and ends with 1.

The gateway is asked over HTTP whether it is ready. The others have no port: this listens on the bus, as gateways do,
for one heartbeat of the member in this container that says `ready`. So a process that hangs, has lost the bus or still
loads its model is not well. Speaks the few lines of the NATS protocol itself, because it runs every few seconds.
"""

import argparse
import http.client
import json
import socket
import ssl
import sys
from collections.abc import Iterator
from io import BufferedRWPair
from urllib.parse import urlsplit

from shared.actors.credentials import read_credentials
from shared.codec import DecodeError, Decoder
from shared.config import BusSettings, SettingsError, parse
from shared.messages import Heartbeat
from shared.subjects import Subjects

TIMEOUT_S = 4.0
PORT = 8000


def main() -> int:
    """The command."""
    service = sys.argv[1]
    try:
        problem = gateway() if service == "gateway" else member(service, socket.gethostname())
    except (OSError, SettingsError, DecodeError, http.client.HTTPException) as error:
        problem = str(error) or type(error).__name__
    print(problem or "ready")
    return 1 if problem else 0


def gateway() -> str:
    """What is wrong with the gateway of this container; empty when it is ready. It speaks HTTP or HTTPS."""
    try:
        return ask(http.client.HTTPConnection("127.0.0.1", PORT, timeout=TIMEOUT_S))
    except (http.client.RemoteDisconnected, ConnectionResetError):
        return ask(http.client.HTTPSConnection("127.0.0.1", PORT, timeout=TIMEOUT_S, context=any_certificate()))


def any_certificate() -> ssl.SSLContext:
    """For the server of this container, whose certificate is made out to another name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def ask(connection: http.client.HTTPConnection) -> str:
    """What /readyz says is wrong."""
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return "" if answer.status == 200 else f"/readyz says {answer.status}: {answer.read(500).decode()}"
    finally:
        connection.close()


def member(service: str, host: str) -> str:
    """What is wrong with the member that runs on this host; empty when its heartbeat says `ready`."""
    for heartbeat in heartbeats(service):
        if heartbeat.id.startswith(f"{service}-{host}-"):
            return "" if heartbeat.state == "ready" else f"its state is {heartbeat.state}"
    return "the bus closed the connection"


def heartbeats(service: str) -> Iterator[Heartbeat]:
    """Heartbeats of a service's members (`*`: of all) as they come. Raises OSError."""
    settings = parse_settings()
    decoder = Decoder((Heartbeat,))
    url = urlsplit(settings.nats.split(",")[0])
    with socket.create_connection((url.hostname or "", url.port or 4222), TIMEOUT_S) as connection:
        connection.settimeout(TIMEOUT_S)
        stream = connection.makefile("rwb")
        listen(stream, Subjects(settings.namespace).heartbeats(service), settings.nats_credentials)
        for payload in messages(stream):
            yield decoder.decode(payload)


def parse_settings() -> BusSettings:
    """The bus, from the environment that the service reads too."""
    return parse(BusSettings, argparse.Namespace())


def listen(stream: BufferedRWPair, subject: str, credentials: str) -> None:
    """Introduces itself to the server and subscribes."""
    stream.readline()
    user, password = read_credentials(credentials) if credentials else ("", "")
    about = {"verbose": False, "pedantic": False, "lang": "python", "version": "0", "name": "healthcheck"}
    about |= {"user": user, "pass": password} if user else {}
    stream.write(f"CONNECT {json.dumps(about)}\r\nSUB {subject} 1\r\n".encode())
    stream.flush()


def messages(stream: BufferedRWPair) -> Iterator[bytes]:
    """Payloads as they come. Raises OSError when the server refuses, and TimeoutError after a silence."""
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
