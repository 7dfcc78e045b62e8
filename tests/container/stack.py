"""The containers of docker-compose.yml for the tests: started, killed, asked and loaded."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "antiphon" / "demo"
SERVICES = ("gateway", "tokenizer", "engine", "detokenizer")
HEALTHY_S, RESTART_S = 240.0, 90.0
NAME = "antiphon-demo"

STATUSES = """
import json, time
from healthcheck import heartbeats
found, end = {}, time.monotonic() + 1.5
for beat in heartbeats("*"):
    of_service = {
        "tokenizer": lambda status: status.num_requests,
        "engine": lambda status: status.counters.generation_tokens,
        "detokenizer": lambda status: status.text_events,
    }
    if work := of_service.get(beat.service):
        found.setdefault(beat.service, {})[beat.id] = work(beat.status)
    if time.monotonic() > end:
        break
print(json.dumps(found))
"""


def run(*argv: str, environ: dict[str, str] | None = None, check: bool = True) -> str:
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **(environ or {})}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or not check, f"{' '.join(argv)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


class Stack:
    """One `docker-compose up` under a project name of its own.

    `files`: files over docker-compose.yml. `images`: with the profile of this name. `replicas`: containers of each
    service.
    """

    def __init__(self, model: Path, *, files: Sequence[str] = (), images: bool = False, replicas: int = 2) -> None:
        names = "-".join([Path(file).stem for file in files] + ["images"] * images)
        self.services = (*SERVICES, *["vision"] * images)
        self._project = f"antiphon-test-{names or 'plain'}-{os.getpid()}"
        self._replicas = replicas
        self._port = free_port()
        self._environ = {
            "MODEL_DIR": str(model),
            "ENGINE_THREADS": "1",
            "OPENAI_API_KEYS": "",
            "PORT": str(self._port),
            "MM": str(images).lower(),
            "COMPOSE_PROFILES": "images" if images else "",
        }
        self._compose = ("docker-compose",) if shutil.which("docker-compose") else ("docker", "compose")
        self._compose += tuple(word for file in ("docker-compose.yml", *files) for word in ("-f", file))

    def compose(self, *words: str, check: bool = True) -> str:
        return run(*self._compose, "-p", self._project, *words, environ=self._environ, check=check)

    def up(self) -> None:
        scale = [word for service in self.services for word in ("--scale", f"{service}={self._replicas}")]
        self.compose("up", "-d", "--build", *scale)

    def down(self) -> None:
        """Nothing that runs or holds data may stay.

        Docker 20.10 sometimes miscounts the endpoints of a network and then keeps it, empty, until it is restarted
        itself ("has active endpoints"; its log at that start: "Fixing inconsistent endpoint_cnt"). That alone is let
        pass; docker-compose then did not come to the volumes.
        """
        self.compose("down", "-v", "--remove-orphans", "-t", "30", check=False)
        if volumes := self._of_project("volume", "ls"):
            run("docker", "volume", "rm", *volumes)
        assert not self._of_project("ps", "-a")
        for network in self._of_project("network", "ls"):
            assert run("docker", "network", "inspect", "-f", "{{len .Containers}}", network) == "0"

    def _of_project(self, *words: str) -> list[str]:
        return run("docker", *words, "-q", "--filter", f"label=com.docker.compose.project={self._project}").split()

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def healthy(self, service: str) -> int:
        states = [run("docker", "inspect", "-f", "{{.State.Health.Status}}", c) for c in self.containers(service)]
        return states.count("healthy")

    def wait_until_healthy(self, timeout_s: float) -> None:
        wait_until(lambda: all(self.healthy(s) == self._replicas for s in self.services), timeout_s, self.describe)

    def gateways(self) -> list[str]:
        """Base URLs, one for each gateway, past the common port."""
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return [f"http://{run('docker', 'inspect', '-f', form, c)}:8000/v1" for c in self.containers("gateway")]

    def balanced(self) -> str:
        """Base URL of the port that all gateways share."""
        return f"http://127.0.0.1:{self._port}/v1"

    def statuses(self) -> dict[str, dict[str, int]]:
        """Work done by each member of each service, from their heartbeats."""
        return json.loads(run("docker", "exec", self.containers("gateway")[0], "python", "-c", STATUSES))

    def kill(self, container: str) -> None:
        """From outside, so that Docker sees a crash and not a command to stop."""
        pid = run("docker", "inspect", "-f", "{{.State.Pid}}", container)
        code = f"import os; os.kill({pid}, 9)"
        run("docker", "run", "--rm", "--pid=host", "--user=0", "--entrypoint=python", "antiphon-tokenizer", "-c", code)

    def starts(self, container: str) -> int:
        return int(run("docker", "inspect", "-f", "{{.RestartCount}}", container))

    def describe(self) -> str:
        return self.compose("ps", check=False) + self.compose("logs", "--tail=30", check=False)[-8000:]


@contextmanager
def started(model: Path, *, files: Sequence[str] = (), images: bool = False, replicas: int = 2) -> Iterator[Stack]:
    """A healthy stack that serves the model of a directory (`demo_model`), and is removed at the end."""
    stack = Stack(model, files=files, images=images, replicas=replicas)
    try:
        stack.up()
        stack.wait_until_healthy(HEALTHY_S)
        yield stack
    finally:
        stack.down()


def demo_model(folder: Path) -> Path:
    """Copies the demo model to a folder that the containers' user can read, whatever the checkout's file modes are."""
    for file in MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return readable(folder)


def readable(folder: Path) -> Path:
    """Lets everybody read the files of a folder."""
    for file in folder.iterdir():
        file.chmod(0o644)
    folder.chmod(0o755)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], bool], timeout_s: float, why: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.5)


async def load(
    urls: list[str], count: int, *, during: Callable[[], None] | None = None, max_retries: int = 0
) -> list[str]:
    """Texts of `count` streamed requests, spread over the gateways; none may fail. `during` runs in their midst.

    `max_retries`: how often a client asks again when a request is refused before its stream begins.
    """
    clients = [openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=max_retries, timeout=120) for url in urls]
    try:
        tasks = [asyncio.create_task(stream(clients[n % len(clients)], n)) for n in range(count)]
        if during:
            await asyncio.sleep(0.3)
            await asyncio.to_thread(during)
            later = range(count, count + count // 2)
            tasks += [asyncio.create_task(stream(clients[n % len(clients)], n)) for n in later]
        return await asyncio.gather(*tasks)
    finally:
        for client in clients:
            await client.close()


async def stream(client: openai.AsyncOpenAI, n: int) -> str:
    messages: Any = [{"role": "user", "content": f"Count from {n % 8} on."}]
    chunks = await client.chat.completions.create(
        model=NAME, messages=messages, stream=True, temperature=0, max_tokens=48, extra_body={"ignore_eos": True}
    )
    text, ended = "", ""
    async for chunk in chunks:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            ended = chunk.choices[0].finish_reason or ended
    assert ended == "length"
    return text
