"""A system under test: `antiphon serve` as a user starts it, and ways to wait for it and ask it. No fixtures."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.shared.actors.standby import stands_by
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
READY_S, END_S = 150.0, 60.0


class Started:
    """A process that was started, and what it has printed on both of its outputs."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], cwd: Path = ROOT) -> None:
        self.process = subprocess.Popen(
            argv, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, timeout_s: float = READY_S) -> None:
        wait_until(lambda: text in self.output or self.process.poll() is not None, timeout_s, lambda: self.output)
        assert text in self.output, self.output

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends the process, if it still runs, and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(END_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


class Served(Started):
    """One `antiphon serve`, or another `command`, and what it printed. `environ` is added to the environment."""

    def __init__(
        self,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        command: tuple[str, ...] = ("antiphon", "serve"),
    ) -> None:
        own = ["--port=0", "--kv-cache-memory-gb=0.05"]
        if command[-1] == "serve" and not any(flag.startswith("--standby") for flag in flags):
            own.append("--standby=off")  # their imports would slow down the tests; `antiphon chaos` has them
        argv = [sys.executable, "-m", *command, *own, *flags]
        super().__init__(argv, {**os.environ, **(environ or {})})

    @property
    def url(self) -> str:
        found = re.search(r'(?:URL +|"url": ")([^\s"]+)', self.output)
        assert found, self.output
        return found[1]

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].split("/")[0])

    def pids(self) -> dict[str, int]:
        """Of the children that run now, by their name; standbys and the process that forks them are left out."""
        found: dict[str, int] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                words = (path / "cmdline").read_text().split("\0")
                if parent != self.process.pid or words[0] == warm.NAME:
                    continue
                if not stands_by(words, (path / "comm").read_text().strip()):
                    named = [word.partition("=")[2] for word in words if word.startswith("--service-id=")]
                    found[named[0] if named else Path(words[0]).name] = int(path.name)
        return found

    def descendants(self) -> list[int]:
        """Process ids of the children, their children, and so on, without the process that forks them."""
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if (path / "cmdline").read_text().split("\0")[0] == warm.NAME:
                    continue
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]


def is_too_busy(served: Served) -> bool:
    """Whether the machine was too busy to hear an engine for a lease, which has its sequences computed elsewhere."""
    return re.search(r"(engine|prefill|decode)-\d has not been heard from", served.output) is not None


def wait_until(condition: Callable[[], bool], timeout_s: float, why: Callable[[], str] = str) -> None:
    """Asks again at growing intervals: conditions often ask the system, which shares the processors with the tests."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < timeout_s, why()
        time.sleep(min(0.02 + waited / 20, 0.25))


def alive(pid: int) -> bool:
    try:
        # While other threads of a killed process end, its first one may be a zombie, and its sockets are open.
        is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not is_zombie or len([*Path(f"/proc/{pid}/task").iterdir()]) > 1
    except OSError:
        return False


@contextlib.contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """The processes stand still. They may end meanwhile."""

    def send(number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


class Slow:
    """Processes that run about a twentieth of the time."""

    def __init__(self, *pids: int) -> None:
        self._turns = {pid: threading.Lock() for pid in pids}
        self._over = threading.Event()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """They stand still. They do not run at their full speed before or after."""
        with contextlib.ExitStack() as turns:
            for turn in self._turns.values():
                turns.enter_context(turn)
            with frozen(*self._turns):
                yield

    def pulse(self, pid: int) -> None:
        """Lets one of them run now and then, until the end. On a busy machine, too, it gets a processor each time."""
        while not self._over.is_set():
            before, until = _ran_s(pid), time.monotonic() + 0.1
            while not self._over.wait(0.005) and _ran_s(pid) - before < 0.002 and time.monotonic() < until:
                pass
            with self._turns[pid], frozen(pid):
                self._over.wait(0.1)

    def end(self) -> None:
        self._over.set()


def _ran_s(pid: int) -> float:
    """The processor time of a process so far, as its clock says (`clock_getcpuclockid`); 0 if it has ended."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


@contextlib.contextmanager
def slowed(*pids: int) -> Iterator[Slow]:
    """The processes run a twentieth of the time, so that what they do lasts however slow the test is."""
    slow = Slow(*pids)
    pulses = [threading.Thread(target=slow.pulse, args=(pid,)) for pid in pids]
    for each in pulses:
        each.start()
    try:
        yield slow
    finally:
        slow.end()
        for each in pulses:
            each.join()


def serve_tiny(model: Path, *flags: str, environ: Mapping[str, str] | None = None) -> Served:
    """Serves a small model under the name `tiny`; returns at once."""
    return Served(f"--model={model}", "--served-model-name=tiny", *flags, environ=environ)


@contextlib.contextmanager
def until_the_end(started: Served, *, reconnects: bool = False) -> Iterator[Served]:
    """Waits until it is ready; stops it at the end. No service may have been refused a subject of the bus.

    `reconnects`: whether the bus breaks connections. The right to reply belongs to the connection that brought the
    request, so that the bus refuses a reply after that.
    """
    try:
        started.wait_for("Antiphon is ready")
        yield started
    finally:
        started.stop()
    refused = [line for line in started.lines if " Violation - " in line]
    assert not [line for line in refused if not (reconnects and ".inbox." in line)], refused


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def fetch(served: Served, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """A plain HTTP request to the system."""
    return fetch_url(method, f"http://127.0.0.1:{served.port}{path}", body, **headers)


def fetch_url(method: str, url: str, body: Any = None, **headers: str) -> Answer:
    """A plain HTTP request."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        data = None if body is None else json.dumps(body)
        path = url.removeprefix(f"{parts.scheme}://{parts.netloc}")
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def has_opentelemetry(pid: int) -> bool:
    """Whether a process has loaded the OTLP exporter: it is Python, but what it encodes with is a shared library."""
    return "google/_upb" in Path(f"/proc/{pid}/maps").read_text()
