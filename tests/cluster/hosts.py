"""Three hosts in network namespaces of their own, each on a cable to one switch, and a fourth host for clients."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.system.machines import ip
from tests.system.served import Started

NETWORK = "10.232.7"
NUM_HOSTS = 3


@dataclass(frozen=True)
class Host:
    """A host: its namespace and address, and the namespace and name of its port at the switch."""

    number: int
    namespace: str
    address: str
    switch: str
    port: str

    def start(self, argv: list[str], environ: Mapping[str, str] | None = None) -> Started:
        """Starts a command there."""
        return Started(["ip", "netns", "exec", self.namespace, *argv], {**os.environ, **(environ or {})})

    def python(self, *words: str, environ: Mapping[str, str] | None = None) -> Started:
        return self.start([sys.executable, "-m", *words], environ)

    def fetch(self, url: str) -> str:
        """Returns what a URL answers there."""
        script = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())"
        argv = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", script, url]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def reaches(self, other: "Host") -> bool:
        """Whether a packet to another host is answered."""
        script = "import socket, sys; socket.create_connection((sys.argv[1], 4222), timeout=2)"
        argv = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", script, other.address]
        return subprocess.run(argv, capture_output=True).returncode == 0

    def cut(self, *, off: bool) -> None:
        """Pulls the cable out of the switch, or puts it in again."""
        ip("-n", self.switch, "link", "set", self.port, "down" if off else "up")


@contextlib.contextmanager
def network() -> Iterator[tuple[list[Host], Host]]:
    """The three hosts, and the clients' one, which is at the switch itself."""
    base = f"antiphon-{os.getpid()}"
    switch = f"{base}-clients"
    names = [f"{base}-{number}" for number in range(1, NUM_HOSTS + 1)]
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "address", "add", f"{NETWORK}.254/24", "dev", "bridge0")
        ip("-n", switch, "link", "set", "bridge0", "up")
        hosts = [_host(number, name, switch) for number, name in enumerate(names, 1)]
        yield hosts, Host(0, switch, f"{NETWORK}.254", switch, "bridge0")
    finally:
        for name in (*names, switch):
            if Path("/run/netns", name).exists():
                ip("netns", "delete", name)


def _host(number: int, name: str, switch: str) -> Host:
    port, address = f"port{number}", f"{NETWORK}.{number}"
    ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("-n", switch, "link", "set", port, "master", "bridge0")
    ip("-n", switch, "link", "set", port, "up")
    ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    return Host(number, name, address, switch, port)
