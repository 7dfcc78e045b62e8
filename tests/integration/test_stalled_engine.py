"""An engine whose computing hangs while its process lives: what streams through it goes on elsewhere, with its text.

The engines are processes on a real server, the other three services run in the test's own process.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.detokenizer.service import DetokenizerService
from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.services.gateway.path.requests.request_actor import RequestActor
from antiphon.services.gateway.path.sequence_state import Phase
from antiphon.services.tokenizer.service import TokenizerService
from antiphon.shared.actors.host import Host, Service
from antiphon.shared.actors.presence import HeartbeatTask, interval_of
from antiphon.shared.clock import SystemClock
from antiphon.shared.config import DetokenizerSettings, TokenizerSettings
from antiphon.shared.messages import Heartbeat
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.subjects import Subjects, new_instance_id
from tests.conftest import Connect, NatsServer
from tests.service_processes import START_S, Processes, Roster
from tests.sim.society import Gateway, make_tokenizer, next_token

pytestmark = pytest.mark.nats
SCRIPT = Path(__file__).with_name("hanging_engine.py")
MAX_TOKENS = 100


@dataclass
class Rig:
    """The deployment, and what its heartbeats have said."""

    connect: Callable[[str], Any]
    subjects: Subjects
    processes: Processes
    model: str
    roster: Roster = field(default_factory=Roster)
    gateway: Gateway = field(default_factory=Gateway)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)

    async def start(self) -> None:
        for service in (
            TokenizerService(TokenizerSettings(model=self.model, served_model_name="m")),
            DetokenizerService(DetokenizerSettings(model=self.model, served_model_name="m")),
            self.gateway,
        ):
            await self._start(service)
        await self.roster.listen(await self.connect("roster"), self.subjects)

    async def engine(self, name: str, **environ: str) -> None:
        """Returns when the gateway knows it, and one of everything else."""
        server = self.processes.server
        self.processes.running[name] = await asyncio.create_subprocess_exec(
            sys.executable, str(SCRIPT), f"--nats={server.url}", f"--nats-credentials={server.credentials}",
            f"--namespace={self.subjects.namespace}", f"--service-id={name}", f"--model={self.model}",
            "--served-model-name=m", "--max-num-seqs=16", "--log-level=warning", stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "HANG_S": "60", **environ},
        )  # fmt: skip
        await self.heard(name, "ready")
        while self.gateway.actor.members.get("engine", name) is None or self.gateway.actor.backend.ready():
            await asyncio.sleep(0.01)

    async def heard(self, name: str, state: str, instance_id: str = "") -> Heartbeat:
        """Waits until a member has said that this is its state; `instance_id`: and that it is another incarnation."""
        async with asyncio.timeout(START_S):
            while (
                (entry := self.roster.heard.get(name)) is None
                or entry[0].state != state
                or entry[0].instance_id == instance_id
            ):
                self.roster.changed.clear()
                await self.roster.changed.wait()
        return entry[0]

    def ask(self, number: int) -> tuple[RequestActor, "asyncio.Task[tuple[str, list[int]]]"]:
        """A request under way, and what its client gets."""
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        request = GenerationRequest(
            request_id=f"r{number}", model="", params=params, inputs=PromptInputs(texts=(prompt(number),))
        )
        actor = self.gateway.actor.backend.generate(request)
        return actor, asyncio.create_task(_collect(actor))

    async def close(self) -> None:
        await self.processes.close()
        for service in self.services[:2]:
            await service.drain()
        await self.gateway.actor.stop()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _start(self, service: Service) -> None:
        transport = await self.connect(service.name)
        host = Host(
            transport=transport,
            subjects=self.subjects,
            clock=SystemClock(),
            id=service.name,
            instance_id=new_instance_id(),
        )
        await service.start(host)
        await transport.barrier()
        beats = HeartbeatTask(host, service, interval_s=interval_of(service.name))
        beats.set_state("ready")
        self.services.append(service)
        self.tasks += [asyncio.create_task(beats.run()), asyncio.create_task(service.run())]


async def _collect(actor: RequestActor) -> tuple[str, list[int]]:
    text, token_ids = "", list[int]()
    async for batch in actor.updates():
        for update in batch:
            text += update.text
            token_ids += update.token_ids
    return text, token_ids


def prompt(number: int) -> str:
    return f"prompt {number} of many"


def expected(number: int) -> tuple[str, list[int]]:
    tokens = list(prompt(number).encode())
    begin = len(tokens)
    for _ in range(MAX_TOKENS):
        tokens.append(next_token(tokens, 0))
    return bytes(tokens[begin:]).decode(), tokens[begin:]


async def running(actors: list[RequestActor], num_tokens: int = 5) -> None:
    """Waits until each has got some tokens."""
    async with asyncio.timeout(START_S):
        while not all(_runs(actor, num_tokens) for actor in actors):
            await asyncio.sleep(0.01)


def _runs(actor: RequestActor, num_tokens: int) -> bool:
    assert actor.error is None, actor.error
    one = actor.sequences[0] if actor.sequences else None
    return one is not None and one.phase is Phase.RUNNING and len(one.token_ids) >= num_tokens


@pytest.fixture
async def rig(
    nats_server: NatsServer, nats_connect: Connect, subjects: Subjects, namespace: str, tmp_path: Path
) -> AsyncIterator[Rig]:
    async def connect(name: str) -> Any:
        return await nats_connect(nats_server, name)

    rig = Rig(connect, subjects, Processes(nats_server, namespace), make_tokenizer(tmp_path))
    await rig.start()
    yield rig
    await rig.close()


@pytest.mark.matrix("R-04")
@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="idle"),
        pytest.param({"SPINS": "1"}, id="spinning", marks=pytest.mark.slow),
        pytest.param({"HANGS_IN_LOOP": "1"}, id="event loop", marks=pytest.mark.slow),
    ],
)
async def test_streams_go_on_on_another_engine_while_a_step_hangs(rig: Rig, environ: dict[str, str]) -> None:
    await rig.engine("e1", **environ)
    await rig.engine("e2", **environ)
    actors, answers = zip(*(rig.ask(number) for number in range(8)), strict=True)
    await running(list(actors))
    on_e1 = [actor for actor in actors if actor.sequences[0].engine.id == "e1"]
    assert 0 < len(on_e1) < len(actors)
    rig.processes.signal("e1", signal.SIGUSR1)
    assert await asyncio.gather(*answers) == [expected(number) for number in range(8)]
    assert {actor.sequences[0].engine.id for actor in actors} == {"e2"} | {
        actor.sequences[0].engine.id for actor in actors if actor not in on_e1
    }
    assert all(actor.sequences[0].attempt == 2 for actor in on_e1)
    assert (await rig.heard("e1", "stalled")).state == "stalled"
    # Nothing new is placed there.
    actor, answer = rig.ask(9)
    assert await answer == expected(9)
    assert actor.sequences[0].engine.id == "e2"


async def test_the_only_engine_goes_on_when_its_step_has_ended(rig: Rig) -> None:
    await rig.engine("e1", HANG_S="4")
    actor, answer = rig.ask(1)
    await running([actor])
    rig.processes.signal("e1", signal.SIGUSR1)
    await rig.heard("e1", "stalled")
    await no_engine(rig)
    assert await answer == expected(1)
    assert actor.sequences[0].attempt == 1, "it stayed where it was: nobody else could go on with it"
    assert (await rig.heard("e1", "ready")).state == "ready"


@pytest.mark.matrix("R-04")
async def test_an_engine_that_stays_stalled_exits_with_13_and_the_stream_goes_on_on_its_successor(rig: Rig) -> None:
    await rig.engine("e1", STALL_EXIT_S="0.5")
    actor, answer = rig.ask(1)
    await running([actor])
    instance_id = (await rig.heard("e1", "ready")).instance_id
    process = rig.processes.running["e1"]
    rig.processes.signal("e1", signal.SIGUSR1)
    said = (await asyncio.wait_for(process.stderr.read(), START_S)).decode()
    assert await rig.processes.ended("e1") == 13
    assert "the engine ends: step" in said
    assert 'hanging_engine.py", line' in said
    await rig.engine("e1")
    assert (await rig.heard("e1", "ready", instance_id)).instance_id != instance_id
    assert await answer == expected(1)


async def test_a_long_first_step_that_computes_is_no_hang(rig: Rig) -> None:
    await rig.engine("e1", FIRST_STEP_S="4")
    actor, answer = rig.ask(1)
    assert await answer == expected(1)
    assert actor.sequences[0].attempt == 1


async def test_a_process_that_was_stopped_as_a_whole_is_not_stalled_when_it_goes_on(rig: Rig) -> None:
    await rig.engine("e1")
    actor, answer = rig.ask(1)
    await running([actor])
    rig.processes.signal("e1", signal.SIGSTOP)
    await no_engine(rig)
    states: list[str] = []
    await (await rig.connect("listener")).subscribe(
        rig.subjects.heartbeats("engine"), lambda delivery: states.append(str(b"stalled" in delivery.payload))
    )
    rig.processes.signal("e1", signal.SIGCONT)
    assert await answer == expected(1)
    assert set(states) == {"False"}
    assert actor.sequences[0].attempt == 1, "it stayed where it was: nobody else could go on with it"


async def test_what_a_silent_engine_has_goes_on_on_another_one_as_soon_as_there_is_one(rig: Rig) -> None:
    await rig.engine("e1")
    actor, answer = rig.ask(1)
    await running([actor])
    rig.processes.signal("e1", signal.SIGSTOP)
    await no_engine(rig)
    assert actor.sequences[0].phase is Phase.RUNNING
    await rig.engine("e2")
    assert await answer == expected(1)
    assert actor.sequences[0].engines == ["e1", "e2"]
    rig.processes.signal("e1", signal.SIGCONT)


async def test_a_request_that_comes_while_the_only_engine_is_silent_waits_for_it(rig: Rig) -> None:
    await rig.engine("e1")
    rig.processes.signal("e1", signal.SIGSTOP)
    await no_engine(rig)
    _, answer = rig.ask(1)
    rig.processes.signal("e1", signal.SIGCONT)
    assert await answer == expected(1)


async def no_engine(rig: Rig) -> None:
    """Waits until the gateway has no engine that responds."""
    async with asyncio.timeout(START_S):
        while rig.gateway.actor.backend.ready() != "Waiting for: engine.":
            await asyncio.sleep(0.01)
