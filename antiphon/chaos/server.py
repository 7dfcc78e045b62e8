"""The server under test: an `antiphon serve` started for the run, or a server that is already running."""

import asyncio
import os
import re
import signal
import sys
import tempfile
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from antiphon.chaos.targets import process_state
from antiphon.client import server_url
from antiphon.launch.readiness import ServerAddress
from antiphon.shared.actors.python_command import python_command
from antiphon.shared.flags import SettingsError
from antiphon.supervision.processes import Child, ChildSpec

READY_S = 180.0
"""Longest wait until the started server is ready, seconds."""
END_S = 40.0
"""Longest wait for the server's end after SIGTERM, seconds."""
REPLICAS = 2
DISK_GB = 1
"""Most that the KV of an engine takes on its disk, a temporary directory, GiB."""
RECORDS = 4096
"""Finished requests of which each gateway keeps the timeline, from which the parts of stalls are computed."""
LAST_LINES = 20
_RUN_DIRECTORY = re.compile(r"antiphon-(\d+)-\w+")
_URL = re.compile(r"^ +console +(http\S+)")


def given(url: str, run_directory: str, token: str) -> tuple[ServerAddress, int]:
    """Returns the address of a running server and its launcher's process id (part of the directory's name).

    Raises SettingsError if either cannot be used.
    """
    parts = server_url(url, "--server", ["http"])
    path = Path(run_directory)
    match = _RUN_DIRECTORY.fullmatch(path.resolve().name)
    if match is None or not path.is_dir():
        raise SettingsError(f"--run-directory: {run_directory!r} is no directory antiphon-PID-… of an `antiphon serve`")
    if process_state(int(match[1])) in ("", "Z"):
        raise SettingsError(f"--run-directory: process {match[1]} does not run any more")
    return ServerAddress(host=parts.hostname or "", port=parts.port or 80, token=token), int(match[1])


@asynccontextmanager
async def own_server(model: str, num_records: int = RECORDS) -> AsyncIterator[tuple[ServerAddress, int]]:
    """Starts a server with `REPLICAS` processes of each service on a free port, and stops it at the end.

    Yields its address and its launcher's process id. `num_records`: finished requests of which a gateway keeps the
    timeline. Raises SettingsError with its last output if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-chaos-") as directory:
        # As on two machines: each engine has a disk of its own, and keeps copies of what is on the other's.
        disks = ",".join(f"{directory}/{number}" for number in range(REPLICAS))
        copies = ("--kv-replicate=peer", "--kv-host=127.0.0.1")
        argv = [*_argv(model, num_records), f"--kv-disk-gb={DISK_GB}", f"--kv-disk-path={disks}", *copies]
        async with _started(argv) as started:
            yield started


@asynccontextmanager
async def _started(argv: list[str]) -> AsyncIterator[tuple[ServerAddress, int]]:
    output = _Output()
    child = Child(ChildSpec(name="serve", service="serve", argv=argv, environ=os.environ), output.take)
    await child.start()
    running = asyncio.create_task(child.wait())
    try:
        await asyncio.wait({running, output.address}, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        if not output.address.done():
            last = "\n".join(output.lines)
            raise SettingsError(f"the server for the run did not start:\n{last}")
        yield output.address.result(), child.pid
    finally:
        child.signal(signal.SIGTERM)
        _, late = await asyncio.wait({running}, timeout=END_S)
        if late:
            child.signal(signal.SIGKILL)
            await asyncio.wait({running})


def _argv(model: str, num_records: int) -> list[str]:
    flags = [f"--{service}={REPLICAS}" for service in ("gateways", "tokenizers", "engines", "detokenizers")]
    flags += ["--port=0", "--log-level=error", "--kv-cache-memory-gb=0.25", f"--record-requests={num_records}"]
    return python_command("antiphon", "serve", *([f"--model={model}"] if model else []), *flags)


class _Output:
    """Reads the server's output: `address` is known when the server is ready; `lines` has the last lines."""

    def __init__(self) -> None:
        self.address: asyncio.Future[ServerAddress] = asyncio.get_running_loop().create_future()
        self.lines: deque[str] = deque(maxlen=LAST_LINES)

    def take(self, _name: str, line: str) -> None:
        """Takes one line."""
        self.lines.append(line)
        if (match := _URL.match(line)) is not None and not self.address.done():
            url = urllib.parse.urlsplit(match[1])
            self.address.set_result(ServerAddress(host=url.hostname or "", port=url.port or 80))
        elif self.address.done():
            print(line, file=sys.stderr, flush=True)
