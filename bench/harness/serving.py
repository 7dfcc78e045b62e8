"""Servers as child processes of a benchmark: starts them, waits until they are ready, pauses, inspects and stops them.

`Server` is any command that starts an HTTP server; `Serving` is `antiphon serve`, the whole system. This module runs no
load. Called by every script that measures through HTTP.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from antiphon.client import Client
from bench.limits_of_machine import processes

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
STOP_S = 40.0
POLL_S = 0.01
TAIL_CHARS = 2000


class Server:
    """A running server, as a context manager. `ready_s` is the time from the start until `ready_path` answered 200."""

    def __init__(
        self, name: str, command: list[str], port: int, ready_path: str, extra_env: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.host, self.port, self.paused = name, HOST, port, False
        self._ready_path = ready_path
        self._log = os.memfd_create(name)
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(extra_env or {})}, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - self.started

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server with SIGTERM, and kills all its processes if they take longer than `STOP_S` seconds."""
        family = processes.tree(self.process.pid)
        processes.resume(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            processes.kill(self.process.pid)
            self.process.wait()
        processes.end_orphans(family)
        os.close(self._log)

    def pause(self) -> None:
        """Pauses all processes of the server with SIGSTOP, so that another server has the whole machine."""
        processes.pause(self.process.pid)
        self.paused = True

    def resume(self) -> None:
        """Resumes the server's processes and returns when the server is ready."""
        processes.resume(self.process.pid)
        self.paused = False
        self.wait_ready()

    def wait_ready(self) -> None:
        """Returns when the server is ready. If it ends instead, raises SystemExit with the end of its output."""
        while self.process.poll() is None:
            if self.get(self._ready_path)[0] == 200:
                return
            time.sleep(POLL_S)
        raise SystemExit(f"{self.name} ended: {self.output()[-TAIL_CHARS:]}")

    def get(self, path: str) -> tuple[int, bytes]:
        """Sends a GET request and returns status and body; status 0 if there is no answer."""
        client = Client(f"http://{self.host}:{self.port}", timeout_s=10)
        try:
            with client.exchange("GET", path) as response:
                return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""

    def model_name(self) -> str:
        """Returns the name of the server's first model."""
        return json.loads(self.get("/v1/models")[1])["data"][0]["id"]

    def output(self) -> str:
        """Returns everything that the server has printed."""
        # Read without seeking, because the server writes at the same file position.
        return os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace")

    def part_of(self, command: str) -> str:
        """Returns the name of the part of the server to which a process belongs. A plain server has one part."""
        del command
        return self.name

    def cpu_seconds(self) -> Counter[str]:
        """Returns the CPU seconds used so far by each part of the server."""
        used: Counter[str] = Counter()
        for process in processes.tree(self.process.pid):
            used[self.part_of(process.command)] += process.cpu_s  # pyright: ignore[reportArgumentType]
        return used

    def memory_mb(self) -> Counter[str]:
        """Returns the resident memory of each part of the server in MiB."""
        used: Counter[str] = Counter()
        for process in processes.tree(self.process.pid):
            used[self.part_of(process.command)] += process.resident_mb  # pyright: ignore[reportArgumentType]
        return used


class Serving(Server):
    """`antiphon serve` with the given flags: NATS and all four services."""

    def __init__(self, *flags: str, name: str = "antiphon") -> None:
        port = free_port()
        command = [sys.executable, "-m", "antiphon", "serve", "--host", HOST, "--port", str(port), *flags]
        super().__init__(name, command, port, "/readyz")

    def part_of(self, command: str) -> str:
        """Returns the name of the service that a process runs."""
        for name in ("gateway", "detokenizer", "tokenizer", "engine"):
            if f"antiphon.services.{name}" in command:
                return name
        return "nats-server" if "nats-server" in command else "launcher"


def end_in_order() -> None:
    """Makes SIGINT and SIGTERM raise SystemExit, so that the servers, which may be paused, are stopped first."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)


def free_port() -> int:
    """Returns a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
