"""Each agent reads a file with a tool and says what is in it, and continues the conversation, with a real server.

The second time an engine is killed, as by kill -9, in the middle of each turn: the agent must not notice. All four find
the demo model behind the server, or, while its context is too short for their prompts, a script (`scripted_engine`).
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from antiphon.shared.models.model_files import DEMO_DIRECTORY, DEMO_NAME
from tests.clients import results
from tests.clients.agents import fixtures
from tests.clients.agents.agents import AGENTS, OTHER_WAYS, Agent, Server
from tests.clients.agents.launcher import ENGINE
from tests.clients.agents.mortal_engine import ORDER
from tests.clients.agents.turns import Session, Turn, session
from tests.support.agent_script import CONTENT, SAYS_SUM, SUM, long_model, question
from tests.system.served import Served, fetch, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
if "ANTIPHON_CLIENTS" not in os.environ:
    pytest.skip("run by `make client-test`, which installs the clients", allow_module_level=True)
CONTEXT, KEY = 32768, "key-of-the-clients"
IN_A_CALL, IN_A_SENTENCE = 12, 3
"""Steps with sampled tokens after which an engine is killed: within the call of a tool, within a short answer."""
ENGINES_S = 120.0
_STARTED, _ENDED = re.compile(r"INFO engine-\d ready"), re.compile(r"engine-\d ended \(")
Tell = Callable[[str, object], None]


@dataclass(frozen=True)
class System:
    """The server, and the order to its engines to die."""

    served: Served
    order: Path
    model: str

    def wait_for_engines(self) -> None:
        """Returns when both engines run, those too that are started again."""

        def both() -> bool:
            told = self.served.output
            return len(_STARTED.findall(told)) == 2 + len(_ENDED.findall(told))

        wait_until(both, ENGINES_S, lambda: self.served.output)

    def kill_an_engine(self, steps: int) -> None:
        """Orders the death of the first engine that samples in so many steps from now on."""
        self.wait_for_engines()
        new = self.order.with_suffix(".new")
        new.write_text(f"{len(_STARTED.findall(self.served.output))} {steps}")
        new.rename(self.order)

    def records(self, turn: Turn) -> list[dict[str, Any]]:
        """Returns what the server knows of the turn's requests."""
        key = {"Authorization": f"Bearer {KEY}"}
        told = fetch(self.served, "GET", "/v1/requests?limit=100", **key).json["data"]
        return [one for one in told if one["id"] in turn.request_ids]

    def moves(self, turn: Turn) -> int:
        """Returns how often sequences of the turn were continued on another engine."""
        return sum(one["moves"] for one in self.records(turn))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("system")
    model = Path(request.config.getoption("--agents-model") or DEMO_DIRECTORY)
    config = json.loads((model / "config.json").read_text())
    name = model.name if model != DEMO_DIRECTORY else DEMO_NAME
    module = "mortal_engine"
    if config["max_position_embeddings"] < CONTEXT:
        name, module, model = "a script", "scripted_engine", long_model(directory, CONTEXT)
    order = directory / "order"
    flags = [f"--model={model}", f"--served-model-name={DEMO_NAME}", "--engines=2", "--kv-cache-memory-gb=0.5"]
    flags += [f"--api-keys={KEY}", "--canary-interval=0"]  # an engine is to be killed in a turn, not in a canary
    environ = {ENGINE: f"tests.clients.agents.{module}", ORDER: str(order)}
    command = ("tests.clients.agents.launcher", "serve")
    with until_the_end(Served(*flags, environ=environ, command=command)) as served:
        system = System(served, order, name)
        system.wait_for_engines()
        yield system


def assert_went_well(turn: Turn, answer: str) -> None:
    """The agent said the answer; every request was answered whole at the first try."""
    asked = [(one.method, one.path, one.status, one.broken) for one in turn.exchanges]
    assert asked, turn.printed
    assert all(one.status == 200 and one.ended for one in turn.exchanges), (asked, turn.printed)
    assert answer in turn.said, turn.printed
    bodies = [one.body for one in turn.exchanges]
    assert len(set(bodies)) == len(bodies), "a request was sent again"


def turns(conversation: Session, ordered: Callable[[int], None]) -> tuple[Turn, Turn]:
    """A turn with a call of a tool, and one that continues it. `ordered` is called before each."""
    notes = conversation.work / "notes.txt"
    notes.write_text(f"{CONTENT}\n")
    ordered(IN_A_CALL)
    first = conversation.turn(question(str(notes)))
    assert_went_well(first, CONTENT)
    *_, last = [one for one in first.exchanges if CONTENT.encode() in one.body]
    assert b"notes.txt" in last.body
    ordered(IN_A_SENTENCE)
    second = conversation.turn(SUM)
    assert_went_well(second, SAYS_SUM)
    assert any(CONTENT.encode() in one.body for one in second.exchanges), "the conversation was not continued"
    return first, second


def tell(record_property: Tell, agent: Agent, system: System, scenario: str, done: tuple[Turn, ...] = ()) -> None:
    """Puts what the agent did into the table of the run."""
    version = results.npm_version(agent.package)
    named = {"client": agent.name, "version": version, "api": agent.api, "scenario": scenario, "model": system.model}
    records = [one for turn in done for one in system.records(turn)]
    counted: dict[str, Any] = {
        "requests": len(records),
        "moves": sum(one["moves"] for one in records),
        "prompt_tokens": max([one["prompt_tokens"] for one in records], default=0),
        "ignored": tuple(sorted({name for one in records for name in one["ignored"]})),
    }
    record_property("client", named)
    record_property("facts", counted)


@pytest.mark.parametrize("agent", [*AGENTS, *OTHER_WAYS], ids=[one.name for one in (*AGENTS, *OTHER_WAYS)])
def test_a_turn_with_a_tool_and_one_that_continues_it(
    agent: Agent, system: System, programs: Path, tmp_path: Path, record_property: Tell, request: pytest.FixtureRequest
) -> None:
    tell(record_property, agent, system, (scenario := "a tool's call, a continued turn"))
    server = Server("", DEMO_NAME, KEY, CONTEXT)
    with session(agent, programs, tmp_path, system.served.port, server) as conversation:
        done = turns(conversation, lambda _: None)
    tell(record_property, agent, system, scenario, done)
    if agent in AGENTS and request.config.getoption("--record-requests"):
        version = results.npm_version(agent.package)
        fixtures.write(agent, version, [one for turn in done for one in turn.exchanges], tmp_path)


@pytest.mark.parametrize("agent", AGENTS, ids=[one.name for one in AGENTS])
def test_an_engine_that_is_killed_in_each_turn_is_not_noticed(
    agent: Agent, system: System, programs: Path, tmp_path: Path, record_property: Tell
) -> None:
    tell(record_property, agent, system, (scenario := "the same, an engine killed in each turn"))
    server = Server("", DEMO_NAME, KEY, CONTEXT)
    with session(agent, programs, tmp_path, system.served.port, server) as conversation:
        done = turns(conversation, system.kill_an_engine)
    assert not system.order.exists(), "no engine was killed"
    tell(record_property, agent, system, scenario, done)
    assert all(system.moves(turn) for turn in done)
