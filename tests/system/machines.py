"""Two machines in network namespaces of their own, joined by a cable, for tests of what runs on several machines."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system.served import Started

ADDRESSES = ("10.231.7.1", "10.231.7.2")
_ASK = """
import json, sys, urllib.request
url, body = sys.argv[1], sys.stdin.read().encode() or None
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
sys.stdout.write(urllib.request.urlopen(request, timeout=90).read().decode())
"""


def why_not() -> str:
    """Returns why namespaces cannot be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not installed"
    name = f"antiphon-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this user cannot make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@dataclass(frozen=True)
class Host:
    """One machine: the name of its namespace, and its address."""

    namespace: str
    address: str
    link: str

    def start(self, *words: str, environ: Mapping[str, str] | None = None) -> Started:
        """Starts a command of this interpreter's Python there."""
        argv = ["ip", "netns", "exec", self.namespace, sys.executable, "-m", *words]
        return Started(argv, {**os.environ, **(environ or {})})

    def ask(self, url: str, body: Any = None) -> Any:
        """Sends a request from this machine and returns the JSON of the answer."""
        argv = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", _ASK, url]
        data = "" if body is None else json.dumps(body)
        return json.loads(subprocess.run(argv, input=data, capture_output=True, text=True, check=True).stdout)

    def cut(self, *, off: bool) -> None:
        """Pulls the network cable out, or puts it in again."""
        ip("-n", self.namespace, "link", "set", self.link, "down" if off else "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two machines that reach each other."""
    names = [f"antiphon-{os.getpid()}-{number}" for number in (1, 2)]
    links = [f"veth{number}" for number in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", links[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
        first, second = (Host(*each) for each in zip(names, ADDRESSES, links, strict=True))
        yield first, second
    finally:
        for name in names:
            if Path("/run/netns", name).exists():
                ip("netns", "delete", name)
