"""A deployment over three hosts: a NATS cluster with a server on each, and services spread so that any host may go.

Host 1: gateway, prefill engine, decode engine, tokenizer. Host 2: prefill engine, detokenizer, tokenizer. Host 3:
gateway, decode engine, detokenizer. Prefill engines have two ranks.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from antiphon.launch.nats_server import environment, find_binary
from tests.cluster.hosts import Host
from tests.system.served import ROOT, Started, wait_until

NATS = ROOT / "infra" / "nats"
ENGINE_FLAGS = ("--dtype=float32", "--block-size=16", "--swap-space=0.05", "--max-num-seqs=64", "--threads=1")
ENGINE_FLAGS = (*ENGINE_FLAGS, "--device=cpu", "--kv-cache-memory-gb=0.1")
PREFILL = (*ENGINE_FLAGS, "--role=prefill", "--tensor-parallel-size=2")
DECODE = (*ENGINE_FLAGS, "--role=decode")
PORT = 8000
READY_S = 120.0
PARTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "prefill-1": (1, "engine", PREFILL),
    "prefill-2": (2, "engine", PREFILL),
    "decode-1": (1, "engine", DECODE),
    "decode-3": (3, "engine", DECODE),
    "tokenizer-1": (1, "tokenizer", ()),
    "tokenizer-2": (2, "tokenizer", ()),
    "detokenizer-2": (2, "detokenizer", ()),
    "detokenizer-3": (3, "detokenizer", ()),
    "gateway-1": (1, "gateway", ()),
    "gateway-3": (3, "gateway", ()),
    "setup-1": (1, "setup", ()),
}
"""Each process: its host, its service, and its flags."""


class Deployment:
    """The running processes, by name; `nats-1` to `nats-3` are the servers of the bus."""

    def __init__(self, hosts: list[Host], model: Path, folder: Path) -> None:
        self.hosts, self._model, self._folder = hosts, model, folder
        self.running: dict[str, Started] = {}
        self.nats = folder / "nats"
        shutil.copytree(NATS, self.nats)
        credentials = folder / "credentials"
        _run([str(self.nats / "make_credentials.sh"), str(credentials)], OWNER="")
        (self.nats / "secrets").mkdir()
        shutil.copy(credentials / "server" / "passwords.conf", self.nats / "secrets")
        named = [f"n{host.number}={host.address}" for host in hosts]
        _run([str(self.nats / "make_route_certificates.sh"), str(folder / "tls"), *named])

    def start(self) -> None:
        """Starts everything at once, and waits until both gateways are ready."""
        for host in self.hosts:
            self.start_node(host)
        for name in PARTS:
            self.start_part(name)
        for gateway in (1, 3):
            host = self.hosts[gateway - 1]
            wait_until(lambda host=host: self._is_ready(host), READY_S, lambda: self.outputs())

    def start_node(self, host: Host) -> None:
        """Starts the NATS server of a host."""
        routes = ", ".join(f'"nats://{each.address}:6222"' for each in self.hosts)
        environ = {
            "NATS_NAME": f"n{host.number}",
            "NATS_ADDRESS": host.address,
            "NATS_ROUTES": f"[{routes}]",
            "NATS_STORE": str(self._folder / f"store-{host.number}"),
            "NATS_TLS": str(self._folder / "tls"),
        }
        argv = [str(self.nats / "start_node.sh"), find_binary()]
        self.running[f"nats-{host.number}"] = host.start(argv, environment({**os.environ, **environ}))

    def start_part(self, name: str) -> None:
        """Starts one process of a service."""
        number, service, flags = PARTS[name]
        host = self.hosts[number - 1]
        environ = {
            "ANTIPHON_NATS": ",".join(f"nats://{each.address}:4222" for each in self.hosts),
            "ANTIPHON_NATS_CREDENTIALS": str(self._folder / "credentials" / service / "credentials"),
            "ANTIPHON_BUS_REPLICAS": str(len(self.hosts)),
        }
        if service == "gateway":
            flags = (f"--host={host.address}", f"--port={PORT}")
        elif service != "setup":
            flags = (f"--model={self._model}", "--served-model-name=tiny", *flags)
        words = ("antiphon", "service", service, f"--service-id={name}", *flags)
        self.running[name] = host.python(*words, environ=environ)

    def urls(self) -> list[str]:
        """The URLs of both gateways."""
        return [f"http://{self.hosts[number - 1].address}:{PORT}" for number in (1, 3)]

    def jetstream(self, host: Host) -> list[dict[str, Any]]:
        """The streams of the bus as one of its servers sees them."""
        found = json.loads(host.fetch("http://127.0.0.1:8222/jsz?streams=true&config=true"))
        return [stream for account in found["account_details"] for stream in account.get("stream_detail", [])]

    def outputs(self) -> str:
        """The last lines of every process."""
        return "\n".join(f"{name}: {line}" for name, each in self.running.items() for line in each.lines[-8:])

    def stop(self) -> None:
        """Stops the services, then the bus."""
        names = sorted(self.running, key=lambda name: (name.startswith("nats"), not name.startswith("gateway")))
        for name in names:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.running.pop(name).stop()

    def _is_ready(self, host: Host) -> bool:
        gone = [name for name, each in self.running.items() if each.process.poll() is not None]
        assert not gone, self.outputs()
        try:
            metrics = host.fetch(f"http://{host.address}:{PORT}/metrics")
            host.fetch(f"http://{host.address}:{PORT}/readyz")
        except subprocess.CalledProcessError:
            return False
        return metrics.count("antiphon:engine_stalled{") == 4


class Load:
    """The clients (`load`), and their answers."""

    def __init__(self, clients: Host, urls: list[str], requests: list[dict[str, Any]], right: list[str]) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", clients.namespace, sys.executable, "-m", "tests.cluster.load"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._requests, self._right = requests, right
        self.answers: list[dict[str, Any]] = []
        self._say(json.dumps({"gateways": urls, "requests": requests}))

    def read(self, per_request: int) -> list[dict[str, Any]]:
        """Returns the answers until there are so many further ones of each request, or one is wrong."""
        assert self._process.stdout is not None
        begun, count = len(self.answers), dict.fromkeys(range(len(self._requests)), 0)
        while min(count.values()) < per_request:
            line = self._process.stdout.readline()
            assert line, "the clients have ended"
            answer = self._take(line)
            count[answer["request"]] += 1
            if answer["lost"] or answer["different"]:
                break
        return self.answers[begun:]

    def finish(self) -> list[dict[str, Any]]:
        """Lets every stream end, and returns the answers that were left."""
        self._say("stop")
        assert self._process.stdout is not None
        begun = len(self.answers)
        while line := self._process.stdout.readline():
            self._take(line)
        assert self._process.wait(30) == 0
        return self.answers[begun:]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _take(self, line: str) -> dict[str, Any]:
        answer = json.loads(line)
        answer["lost"] = "error" in answer
        answer["different"] = answer.get("text", "") != self._right[answer["request"]]
        self.answers.append(answer)
        return answer

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def deployed(hosts: list[Host], model: Path, folder: Path) -> Iterator[Deployment]:
    made = Deployment(hosts, model, folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _run(argv: list[str], **environ: str) -> None:
    subprocess.run(argv, check=True, env={**os.environ, **environ})
