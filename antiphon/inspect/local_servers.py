"""The servers that this user has started on this machine: the addresses that they listen on, and their buses.

A launcher has a private directory, whose name has its process id, and holds the listening sockets of its gateways.
Their ports are read from /proc, which only Linux has; elsewhere the addresses are not known.
"""

import contextlib
import re
import socket
import tempfile
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from antiphon.launch.nats_server import ADDRESS_FILE
from antiphon.launch.run_directory import is_own_directory

_NAME = re.compile(r"antiphon-(\d+)-\w+")
_LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """A server: its launcher's process id and directory, the URLs of its gateways, and the file of its bus's URL.

    `bus` is None if the server uses a bus that it has not started.
    """

    pid: int
    directory: Path
    urls: tuple[str, ...]
    bus: Path | None

    def listens_at(self, url: str) -> bool:
        """Whether a gateway has the port of this URL."""
        port = urllib.parse.urlsplit(url if "//" in url else f"http://{url}").port
        return any(urllib.parse.urlsplit(own).port == port for own in self.urls)


def local_servers(parent: Path | None = None, proc: Path = Path("/proc")) -> list[LocalServer]:
    """Returns the servers whose launchers run. `parent`: where their directories are, usually /tmp."""
    found: list[LocalServer] = []
    for path in sorted((parent or Path(tempfile.gettempdir())).glob("antiphon-*")):
        match = _NAME.fullmatch(path.name)
        if match is None or not is_own_directory(path) or not (proc / match[1]).is_dir():
            continue  # The directory of a launcher that was killed is removed by the next one.
        bus = path / ADDRESS_FILE
        urls = tuple(dict.fromkeys(_urls(proc / match[1], proc)))
        found.append(LocalServer(pid=int(match[1]), directory=path, urls=urls, bus=bus if bus.is_file() else None))
    return found


def _urls(process: Path, proc: Path) -> Iterator[str]:
    """Yields the URLs of the sockets on which a process listens."""
    own: set[str] = set()
    with contextlib.suppress(OSError):
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                own |= {target[8:-1]} if target.startswith("socket:[") else set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[9] in own:
                    yield _url(fields[1], family)


def _url(hexadecimal: str, family: socket.AddressFamily) -> str:
    """Returns the URL of an address in /proc/net/tcp: words of 32 bits in the machine's order, and the port."""
    address, _, port = hexadecimal.partition(":")
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    host = socket.inet_ntop(family, b"".join(words))
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{int(port, 16)}"
