"""Turns of an agent whose tools the server runs, while gateways and engines are killed: each call is made once."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.slow import slow_but
from tests.system.served import ROOT, Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]
FLAGS = ("--dtype=float32", "--block-size=16", "--max-num-seqs=16", "--gateways=2", "--engines=2")
NUM_CALLS, NUM_TURNS, CALL_S = 8, 2, 0.05
RESPONSES = "/v1/responses"


@dataclass
class System:
    served: Served
    log: Path

    def start(self, number: int, tool: str) -> str:
        """Starts a turn that outlives its client; returns its id."""
        mcp = {"type": "mcp", "server_label": "sums", "require_approval": "never", "allowed_tools": [tool]}
        body = {
            "model": "tiny", "input": f"{number}: add", "seed": number, "temperature": 0.9, "background": True,
            "tools": [mcp], "tool_choice": "required", "parallel_tool_calls": False, "max_tool_calls": NUM_CALLS,
            "max_output_tokens": 1500,
        }  # fmt: skip
        if number % 2 == 0:
            answer = fetch(self.served, "POST", RESPONSES, body)
            assert answer.status == 200, answer.body
            return json.loads(answer.body)["id"]
        # A client that waits for its stream is gone as soon as it knows the id.
        connection = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=60)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", RESPONSES, json.dumps({**body, "background": False, "stream": True}), headers)
            with connection.getresponse() as stream:
                assert stream.readline() == b"event: response.created\n"
                return json.loads(stream.readline().removeprefix(b"data: "))["response"]["id"]

    def ended(self, name: str) -> dict[str, Any]:
        """Returns a turn when it has ended."""
        found: dict[str, Any] = {}

        def has_ended() -> bool:
            with contextlib.suppress(OSError):
                answer = fetch(self.served, "GET", f"{RESPONSES}/{name}")
                if answer.status == 200:
                    found.update(json.loads(answer.body))
            return found.get("status") not in (None, "queued", "in_progress")

        wait_until(has_ended, 90, lambda: f"{found}\n{self.served.output[-3000:]}")
        return found

    def made(self) -> list[Any]:
        """The calls that the tool has carried out."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def reaches(self, count: int) -> None:
        """Waits until so many calls were carried out."""
        wait_until(lambda: len(self.made()) >= count, 60)

    def kill(self, kind: str, chance: random.Random) -> None:
        pids = {name: pid for name, pid in self.served.pids().items() if name.startswith(kind)}
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[chance.choice(sorted(pids))], signal.SIGKILL)

    def settle(self) -> None:
        """Waits until all processes are back."""
        wait_until(lambda: {"gateway-1", "gateway-2", "engine-1", "engine-2"} <= set(self.served.pids()), 60)
        wait_until(lambda: _is_ready(self.served), 60)


def _is_ready(served: Served) -> bool:
    with contextlib.suppress(OSError):
        return fetch(served, "GET", "/health").status == 200
    return False


def transcript(response: dict[str, Any]) -> Any:
    """What a turn has given, without its own id."""
    assert response["error"] is None, response
    own = response["id"].removeprefix("resp_")
    return json.loads(json.dumps([response["status"], response["output"]]).replace(own, "_"))


@pytest.fixture(scope="module")
def system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("turns")
    log = folder / "calls"
    log.touch()
    command = [sys.executable, "-m", "tests.support.mcp_server", str(log), str(CALL_S)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tool:
        try:
            assert tool.stdout is not None
            port = int(re.sub(r"\D", "", tool.stdout.readline()))
            file = folder / "servers.json"
            file.write_text(json.dumps({"servers": {"sums": {"url": f"http://127.0.0.1:{port}/mcp"}}}))
            with until_the_end(serve_tiny(model, *FLAGS, f"--mcp-servers={file}"), reconnects=True) as served:
                yield System(served, log)
        finally:
            tool.kill()


RIGHT: dict[str, list[Any]] = {}


def right(system: System, tool: str) -> list[Any]:
    """The transcripts of undisturbed turns with this tool."""
    if tool not in RIGHT:
        names = [system.start(number, tool) for number in range(NUM_TURNS)]
        RIGHT[tool] = [transcript(system.ended(name)) for name in names]
    return RIGHT[tool]


@pytest.mark.parametrize("seed", slow_but([0], list(range(8))))
def test_killed_gateways_and_engines_change_no_turn_and_repeat_no_call(system: System, seed: int) -> None:
    chance = random.Random(seed)
    system.settle()
    expected = right(system, "look_up")
    before = len(system.made())
    names = [system.start(number, "look_up") for number in range(NUM_TURNS)]
    for kind in ("gateway", "engine", "gateway"):
        system.reaches(min(len(system.made()) + chance.randrange(1, 4), before + NUM_TURNS * NUM_CALLS))
        time.sleep(chance.random() * CALL_S)
        system.kill(kind, chance)
    responses = [system.ended(name) for name in names]
    assert [transcript(one) for one in responses] == expected
    made = system.made()[before:]
    keys = [one["key"] for one in made]
    assert len(set(keys)) == len(keys) == NUM_TURNS * NUM_CALLS
    items = [item for one in responses for item in one["output"] if item["type"] == "mcp_call"]
    assert sorted(keys) == sorted(item["id"] for item in items)


def test_a_call_whose_result_is_lost_is_not_made_again(system: System) -> None:
    system.settle()
    before = len(system.made())
    name = system.start(0, "add")
    system.reaches(before + 1)
    for kind in ("gateway-1", "gateway-2"):
        system.kill(kind, random.Random(0))
    stopped = system.ended(name)
    assert (stopped["status"], stopped["incomplete_details"]) == ("incomplete", {"reason": "tool_result_unknown"})
    [made] = system.made()[before:]
    lost = stopped["output"][-1]
    assert (lost["id"], lost["status"], lost["output"]) == (made["key"], "incomplete", None)
    told = {"type": "function_call_output", "call_id": lost["id"], "output": "7"}
    body = {"model": "tiny", "previous_response_id": name, "input": [told], "max_output_tokens": 4, "ignore_eos": True}
    answer = fetch(system.served, "POST", RESPONSES, body)
    assert answer.status == 200, answer.body
    assert len(system.made()) == before + 1


@pytest.mark.parametrize("seed", slow_but([], list(range(6))))
def test_a_call_that_may_not_be_repeated_is_made_once_or_ends_its_turn(system: System, seed: int) -> None:
    chance = random.Random(seed)
    system.settle()
    undisturbed = right(system, "add")
    before = len(system.made())
    names = [system.start(number, "add") for number in range(NUM_TURNS)]
    for _ in range(2):
        time.sleep(chance.uniform(0.2, 1.0))
        system.kill("gateway", chance)
    for name, expected in zip(names, undisturbed, strict=True):
        response = system.ended(name)
        if response["status"] == "incomplete" and response["incomplete_details"]["reason"] == "tool_result_unknown":
            assert [item["status"] for item in response["output"] if item["type"] == "mcp_call"][-1] == "incomplete"
        else:
            assert transcript(response) == expected
    keys = [one["key"] for one in system.made()[before:]]
    assert len(set(keys)) == len(keys)
