"""Instances of a deployment with separate prefill and decode instances, started by the role script. No fixtures."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conftest import free_port
from tests.system.served import END_S, ROOT, Started

TOOLS = ROOT / "infra" / "llm_tools" / "PD_separate"
FLAGS = ("--max-model-len=512", "--max-num-seqs=16", "--max-num-batched-tokens=512", "--host=0.0.0.0")
"""The flags of the script's documentation, at the size of a small model."""
MORE = ("--kv-cache-memory-gb=0.05", "--dtype=float32", "--threads=1")


def free_ports(count: int) -> list[int]:
    ports = set[int]()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


class Role(Started):
    """One call of start_servers.sh, and what it printed."""

    def __init__(self, name: str, argv: list[str], environ: dict[str, str]) -> None:
        self.name = name
        super().__init__(["sh", str(TOOLS / "start_servers.sh"), *argv], environ)

    def code(self) -> int:
        """The exit code, once the process has ended by itself."""
        self.process.wait(END_S)
        return self.stop()


def make_tables(folder: Path, *words: str) -> list[Path]:
    """Runs the tool by its path, and returns the files that it names."""
    argv = [sys.executable, str(TOOLS / "pd_ranktable_tools.py"), *words, "--save-dir", str(folder)]
    done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True)
    return [Path(line) for line in done.stdout.splitlines()]


class Machine:
    """The tables of one machine, made by the tool, and the instances that were started with them.

    `words` are flags of the tool.
    """

    def __init__(self, folder: Path, model: Path, *words: str) -> None:
        self.folder, self.model = folder, model
        (self.table,) = [path for path in make_tables(folder, "--mode", "gen", *words) if "global" in path.name]
        self.ip = self.table.stem.removeprefix("global_ranktable_")
        self.running: list[Role] = []

    def start(self, name: str, port: int, node_ports: str = "", *flags: str, **variables: str) -> Role:
        """Starts an instance by the ids in the name of its local table, or `host`."""
        environ = {
            **os.environ,
            "ANTIPHON_PYTHON": sys.executable,
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "LLM_TOOLS_PATH": str(TOOLS.parent),
            "GLOBAL_RANK_TABLE_FILE_PATH": str(self.table),
            "RANK_TABLE_FILE_PATH": str(self.folder / f"local_ranktable_{self.ip}_{name}.json"),
            "NODE_PORTS": node_ports,
            "USE_OPENAI": "1",
            **variables,
        }
        argv = [f"--model={self.model}", "--tensor-parallel-size=1", *FLAGS, f"--port={port}", *MORE]
        role = Role(name, [*argv, "--served-model-name", "demo", *flags], environ)
        self.running.append(role)
        return role

    def stop(self) -> None:
        """Stops the scheduler first, as one would."""
        for role in sorted(self.running, key=lambda each: each.name != "host"):
            role.stop()


@contextlib.contextmanager
def machine(folder: Path, model: Path, *words: str) -> Iterator[Machine]:
    """A machine whose instances are stopped at the end."""
    made = Machine(folder, model, *words)
    try:
        yield made
    finally:
        made.stop()


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    """A request to a port of this machine: the status (0: nobody answers) and the JSON of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("POST" if data else "GET", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if re.match(rb"[\[{]", data) else data.decode()
    except (OSError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()
