"""One agent at work: a home and a scratch directory of its own, no variable of the tester's, all requests recorded."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.agents.agents import Agent, Server
from tests.clients.agents.recorder import Exchange, Recorder

TURN_S = 300.0


@dataclass(frozen=True)
class Turn:
    """What an agent did in one turn."""

    said: str
    exchanges: Sequence[Exchange]
    seconds: float
    printed: str

    @property
    def request_ids(self) -> list[str]:
        return [one.answer_headers["x-request-id"] for one in self.exchanges]


class Session:
    """The conversation of one agent. A first turn, and turns that continue it."""

    def __init__(self, agent: Agent, program: Path, directory: Path, server: Server, recorder: Recorder) -> None:
        self._agent = agent
        self._program = program
        self._recorder = recorder
        self.work = directory / "work"
        home = directory / "home"
        setup = agent.setup(server)
        self.work.mkdir()
        home.mkdir()
        if setup.path:
            (home / setup.path).parent.mkdir(parents=True, exist_ok=True)
            (home / setup.path).write_text(setup.text)
        node = Path(shutil.which("node") or "node").parent
        base = {"HOME": str(home), "PATH": f"{node}:/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "dumb"}
        self._environ = {**base, **setup.variables, **agent.quiet}
        self._turns = 0

    def turn(self, question: str) -> Turn:
        """Asks the agent, and waits until it has ended. Its exit code must be 0."""
        words = self._agent.go_on if self._turns else self._agent.ask
        self._turns += 1
        before, started = len(self._recorder.exchanges), time.monotonic()
        done = subprocess.run(
            [str(self._program), *words, question],
            env=self._environ,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_S,
        )
        seconds = time.monotonic() - started
        exchanges = self._recorder.exchanges[before:]
        printed = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, (printed, [(one.path, one.status, one.answer[-500:]) for one in exchanges])
        return Turn(self._agent.said(_objects(done.stdout)), exchanges, seconds, printed)


@contextmanager
def session(agent: Agent, programs: Path, directory: Path, port: int, server: Server) -> Iterator[Session]:
    """Gives a session whose requests go through a recorder to the server of the port; `server` is the rest of it."""
    recorder = Recorder(port)
    with recorder.running():
        told = Server(f"http://127.0.0.1:{recorder.port}", server.model, server.key, server.context)
        yield Session(agent, programs / agent.program, directory, told, recorder)


def _objects(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
