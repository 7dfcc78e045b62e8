"""A server whose processes record what they run (`infra.walk.hook`), and requests to it. Nothing is counted here."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from antiphon.client import Client
from infra.walk import hook
from infra.walk.figures import Recording, Step

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--port=0", "--device=cpu", "--kv-cache-memory-gb=0.05", "--standby=off", "--canary-interval=0")
"""No canary: it runs the engine's whole path when the server is idle, so that the path of a request would not show."""
QUESTION = "Tell me a story."
TOKENS = 4
READY_S, ANSWER_S, END_S = 180.0, 30.0, 40.0
SETTLE_S = 0.4
"""Time after an answer in which the processes do what the request left to do, seconds."""
_PROCESSES_MAX = 128
_SERVICE = re.compile(r"-m antiphon\.services\.([\w.]+)")
_URL = re.compile(r"URL +(http://[\d.:]+)")


@dataclass
class Process:
    """One Python process of the server: its service, process id and connection."""

    name: str
    pid: int
    channel: socket.socket
    answers: BinaryIO

    def order(self, command: bytes) -> None:
        """Gives a command to the hook in the process. Raises OSError if the process has ended."""
        self.channel.sendall(command)
        os.kill(self.pid, hook.SIGNAL)

    def close(self) -> None:
        """Closes the connection."""
        self.answers.close()
        self.channel.close()


class TracedServer:
    """A server that is ready. `listener` is the socket at which its processes connect."""

    def __init__(self, client: Client, listener: socket.socket) -> None:
        self._client = client
        self._listener = listener
        self._processes: list[Process] = []
        self._model = client.first_model()

    def chat(self) -> None:
        """Has `TOKENS` tokens streamed on a new connection, and waits `SETTLE_S` after the answer."""
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": self._model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        with self._client.exchange("POST", "/v1/chat/completions", json.dumps(body).encode()) as response:
            answer = response.read()
        assert answer.endswith(b"data: [DONE]\n\n"), answer
        time.sleep(SETTLE_S)

    def recorded(self, work: Callable[[], None]) -> Recording:
        """Returns what each process runs during `work`, without those that end meanwhile."""
        self._meet()
        self._ask(hook.BEGIN, lambda process: process.answers.read(1))
        work()
        recording: Recording = {}
        for process, line in self._ask(hook.END, lambda process: process.answers.readline()):
            recording.setdefault(process.name, []).extend(_steps(line))
        return recording

    def close(self) -> None:
        """Closes the connections with the processes."""
        for process in self._processes:
            process.close()

    def _ask(self, command: bytes, read: Callable[[Process], bytes]) -> list[tuple[Process, bytes]]:
        """Gives a command to all processes and returns their answers; forgets processes that have ended."""
        answers: list[tuple[Process, bytes]] = []
        for process in self._processes:
            with suppress(ConnectionError, ProcessLookupError):
                process.order(command)
                if answer := read(process):
                    answers.append((process, answer))
                    continue
            process.close()
        self._processes = [process for process, _ in answers]
        return answers

    def _meet(self) -> None:
        """Accepts the connections of the processes that have been started since the last time."""
        with suppress(BlockingIOError):
            while True:
                channel, _ = self._listener.accept()
                channel.settimeout(ANSWER_S)
                pid, _, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                answers = channel.makefile("rb")
                service = _SERVICE.search(answers.readline().decode())
                self._processes.append(Process(service[1] if service else "launcher", pid, channel, answers))


@contextmanager
def traced_server() -> Iterator[TracedServer]:
    """Starts `antiphon serve` with the demo model and the hook in all its processes; stops it at the end.

    Raises RuntimeError with the server's output if it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="walk-") as name, socket.socket(socket.AF_UNIX) as listener:
        directory = Path(name)
        (directory / "sitecustomize.py").symlink_to(hook.__file__)
        listener.bind(str(directory / "recorder"))
        listener.listen(_PROCESSES_MAX)
        listener.setblocking(False)
        environ = {**os.environ, "PYTHONPATH": name}
        output = directory / "output"
        argv = [sys.executable, "-m", "antiphon", "serve", *FLAGS]
        with output.open("wb") as log, subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=log, stderr=log) as process:
            try:
                with closing(TracedServer(Client(_url(process, output), timeout_s=ANSWER_S), listener)) as server:
                    yield server
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()


def _url(server: "subprocess.Popen[bytes]", output: Path) -> str:
    """Waits until the server has printed its URL, which it does when it is ready."""
    deadline = time.monotonic() + READY_S
    while (found := _URL.search(output.read_text(errors="replace"))) is None:
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not become ready:\n{output.read_text(errors='replace')}")
        time.sleep(0.05)
    return found[1]


def _steps(line: bytes) -> Iterator[Step]:
    told = json.loads(line)
    functions = [(file, name) for file, name in told["functions"]]
    return (Step(kind, functions[index]) for kind, index in told["entries"])
