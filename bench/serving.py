"""Starts `antiphon serve` for a benchmark, and books the CPU time of each of its processes."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")


class Serving:
    """A running system; a context manager. `ready_s` is the time from the command to /readyz."""

    def __init__(self, *flags: str) -> None:
        self.host, self.port = "127.0.0.1", _free_port()
        command = [sys.executable, "-m", "antiphon", "serve", "--host", self.host, "--port", str(self.port), *flags]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._wait()
        self.ready_s = time.perf_counter() - self.started

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    def cpu_seconds(self) -> Counter[str]:
        """CPU time so far, by service."""
        used: Counter[str] = Counter()
        for pid in _tree(self.process.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                fields = (
                    Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
                )
            except OSError:
                continue
            used[_service(command)] += (int(fields[11]) + int(fields[12])) / TICKS
        return used

    def memory_mb(self) -> Counter[str]:
        """Resident memory now, by service, MiB."""
        used: Counter[str] = Counter()
        for pid in _tree(self.process.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
            except OSError:
                continue
            used[_service(command)] += pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return used

    def _wait(self) -> None:
        while self.process.poll() is None:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=2)
            try:
                connection.request("GET", "/readyz")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.01)
        assert self.process.stderr is not None
        raise SystemExit(f"antiphon serve ended: {self.process.stderr.read()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _service(command: str) -> str:
    for name in ("gateway", "detokenizer", "tokenizer", "engine"):
        if f"services.{name}" in command:
            return name
    return "nats-server" if "nats-server" in command else "launcher"


def _tree(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += [child for child, parent in parents.items() if parent == pid]
    return found
