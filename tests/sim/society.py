"""All four real actors in one event loop on the in-process bus, in virtual time. For the simulation tests.

Each member is a `SimProcess`, so that it can be stopped, resumed and killed like one. Two parts are not the product's:
the model, because a simulation must be exact (`model.HashWorker`), and the engine's driver, because a thread has no
virtual time (`doubles.TaskLoop`).
"""

import asyncio
import functools
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from antiphon.services.engine.executor import Executor
from antiphon.services.gateway.guests import make_guests
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.generation import Generation, GenerationRequest, SequenceUpdate
from antiphon.shared import limits
from antiphon.shared.actors.host import Host, Service
from antiphon.shared.actors.presence import HeartbeatTask, interval_of
from antiphon.shared.config import DetokenizerSettings, EngineSettings, GatewaySettings, TokenizerSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ServiceName
from antiphon.shared.subjects import Subjects
from tests.sim.doubles import STEP_S, SimulatedDetokenizer, SimulatedEngine, SimulatedTokenizer
from tests.sim.model import HashModel, HashWorker, PipelinedHashWorker, next_token
from tests.sim.transfers import Network
from tests.support.memory import MemoryBus
from tests.support.memory_connection import MemoryTransport
from tests.support.simulation import SimClock, SimProcess

RUN_END_S = 2.0


@dataclass(eq=False)
class Member:
    """One incarnation of a service, as a process."""

    name: str
    kind: str
    service: Any
    host: Host
    transport: MemoryTransport
    process: SimProcess
    beats: HeartbeatTask
    run: "asyncio.Task[None]"
    model: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process has ended, whichever way."""
    freezes: int = 0
    cuts: int = 0
    draining: bool = False
    num_tasks: int = 0
    """Tasks that it has without work."""


@dataclass
class Answer:
    """What a client of the society got."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    """The tokens of prompts whose log probabilities were reported, by the sequence that reported them."""
    finish: dict[int, str] = field(default_factory=dict)
    stop_reason: dict[int, str | int | None] = field(default_factory=dict)
    vectors: dict[int, bytes] = field(default_factory=dict)
    error: ServiceError | None = None
    refused: bool = False
    """The gateway did not accept the request; `error` says why."""
    lost: bool = False
    """The gateway's process ended under it."""
    ends: int = 0
    accepted_s: float | None = None
    ended_s: float | None = None
    generation: Generation | None = None
    cancelled: bool = False

    def add(self, update: SequenceUpdate) -> None:
        assert not self.ends, "an update after the end"
        assert update.index not in self.finish, "an update after the sequence's end"
        self.prompts.setdefault(update.index, []).extend(one.chosen.token_id for one in update.prompt_logprobs)
        self.texts[update.index] = self.texts.get(update.index, "") + update.text
        self.token_ids.setdefault(update.index, []).extend(update.token_ids)
        if update.finish_reason:
            self.finish[update.index] = update.finish_reason
            self.stop_reason[update.index] = update.stop_reason
            self.vectors[update.index] = update.vector


class Gateway:
    """The gateway's actor without its HTTP edge, as a Service."""

    name: ServiceName = "gateway"

    async def start(self, host: Host) -> None:
        self.actor = GatewayActor(host)
        make_guests(self.actor, GatewaySettings())
        self.guests = {type(guest): guest for guest in self.actor.guests}
        await self.actor.listen()
        self._tasks = [asyncio.create_task(self.actor.run()), asyncio.create_task(self.actor.watch())]

    def status(self):
        return self.actor.backend.status()

    async def run(self) -> None:
        await asyncio.gather(*self._tasks)

    async def drain(self) -> None:
        await self.actor.backend.drain()


class Society:
    """A deployment: starts members, breaks them, asks it things.

    `model_dirs`: one directory for each model, by index; `models`: what the workers of each compute.
    """

    def __init__(
        self,
        model_dir: str | tuple[str, ...],
        seed: int = 0,
        models: tuple[HashModel, ...] = (HashModel(),),
        delay_s: tuple[float, float] = (0.0001, 0.002),
        **flags: Any,
    ) -> None:
        self.bus = MemoryBus(seed, delay_s)
        self.model_dirs = (model_dir,) if isinstance(model_dir, str) else model_dir
        self.models = models
        self.members: dict[str, Member] = {}
        self.ended: list[Member] = []
        """Processes that have ended; a killed one's tasks are kept, as nothing of it may run."""
        self.crashes: list[tuple[str, BaseException | None]] = []
        self.subjects = Subjects()
        self.network = Network(random.Random(seed))
        """The connections by which engines with roles exchange KV."""
        self.step_s = STEP_S
        self.waits = False
        """Whether sequences sometimes wait for a mask."""
        self.connectable = asyncio.Event()
        """Clear while no new connection can be made."""
        self.connectable.set()
        self._numbers = 0
        self._flags = flags

    # --- members ---

    async def start(self, kind: str, name: str = "", model: int = 0, **engine: Any) -> Member:
        """Starts a replica; its id is its name. `engine`: options of the worker, and `pipelined`."""
        name = name or f"{kind}{sum(m.kind == kind for m in self.members.values())}"
        await self.connectable.wait()
        process = SimProcess(name)
        self._numbers += 1
        return await process.spawn(self._instance_id(kind, name, model, process, f"{self._numbers:08x}", engine))

    async def _instance_id(
        self, kind: str, name: str, model: int, process: SimProcess, instance_id: str, engine: dict[str, Any]
    ) -> Member:
        transport = self.bus.connect(name, inbox_prefix=self.subjects.inbox(kind, name))
        service = self._make(kind, model, address=f"{name}:{instance_id}", **engine)
        host = Host(transport=transport, subjects=self.subjects, clock=SimClock(), id=name, instance_id=instance_id)
        await service.start(host)
        run = asyncio.create_task(service.run())
        await transport.barrier()
        beats = HeartbeatTask(host, service, interval_s=interval_of(service.name))
        await beats.start("ready")
        if isinstance(service, SimulatedEngine):
            service.driver.step_s = self.step_s
        member = Member(name, kind, service, host, transport, process, beats, run, model)
        run.add_done_callback(functools.partial(self._ran, member))
        self.members[name] = member
        member.num_tasks = len(process.tasks()) - 1  # without this one
        return member

    def kill(self, name: str) -> None:
        """kill -9: nothing it says is heard any more, and it hears nothing."""
        self._end(self.members[name])

    def terminate(self, name: str) -> None:
        """SIGTERM: what `antiphon.shared.actors.service` does with it."""
        member = self.members[name]
        if not member.draining:
            member.draining = True
            member.process.spawn(self._drain(member))

    def freeze(self, member: Member) -> None:
        """SIGSTOP."""
        member.freezes += 1
        if not member.gone.is_set() and member.freezes == 1:
            self.bus.freeze(member.name)
            member.process.stop()

    def thaw(self, member: Member, hears_first: bool = True) -> None:
        """SIGCONT. `hears_first`: what came meanwhile is read before the timers that expired, else a little after."""
        member.freezes -= 1
        if member.gone.is_set() or member.freezes:
            return
        member.process.resume()
        if hears_first:
            self._thaw_link(member)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(0.001, self._thaw_link, member)

    def cut(self, member: Member) -> None:
        """The member's link to the bus breaks."""
        member.cuts += 1
        if not member.gone.is_set() and member.cuts == 1:
            self.bus.partition(member.name)

    def heal(self, member: Member) -> None:
        """The link can be made anew; a frozen process does so when it goes on."""
        member.cuts -= 1
        if not member.gone.is_set() and not member.cuts and not member.freezes:
            self.bus.heal(member.name)

    def _thaw_link(self, member: Member) -> None:
        if member.gone.is_set() or member.freezes:
            return
        self.bus.thaw(member.name)
        if not member.cuts and not member.transport.connected:
            self.bus.heal(member.name)

    async def _drain(self, member: Member) -> None:
        await member.beats.announce("draining")
        try:
            async with asyncio.timeout(limits.DRAIN_S):
                await member.service.drain()
        except TimeoutError:
            pass
        await asyncio.wait({member.run}, timeout=RUN_END_S)
        await member.beats.stop()
        await member.transport.close()
        self._end(member)

    def _ran(self, member: Member, run: "asyncio.Task[None]") -> None:
        if member.gone.is_set() or run.cancelled() or (run.exception() is None and member.draining):
            return
        self.crashes.append((member.name, run.exception()))
        self._end(member)

    def _end(self, member: Member) -> None:
        if member.gone.is_set():
            return
        member.gone.set()
        self.network.senders.pop(f"{member.name}:{member.host.instance_id}", None)
        if not member.transport.closed:
            self.bus.crash(member.name)
        member.process.stop()
        del self.members[member.name]
        self.ended.append(member)

    # --- clients ---

    async def ready(self) -> Gateway:
        """Waits until the first gateway sees one of everything."""
        gateway = next(m.service for m in self.members.values() if isinstance(m.service, Gateway))
        while gateway.actor.backend.ready():
            await asyncio.sleep(0.01)
        return gateway

    async def ask(self, request: GenerationRequest, gateway: str = "gateway0", answer: Answer | None = None) -> Answer:
        """One request to its end, or to the end of the gateway's process."""
        answer = answer or Answer()
        member = self.members[gateway]
        edge = member.process.spawn(_edge(member.service.actor, request, answer))
        gone = asyncio.create_task(member.gone.wait())
        await asyncio.wait([edge, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if edge.done():
            edge.result()
        else:
            answer.lost = True
        answer.ended_s = asyncio.get_running_loop().time()
        return answer

    def cancel(self, gateway: Member, answer: Answer) -> None:
        """The client closes its connection."""
        if answer.generation is not None and not gateway.gone.is_set():
            answer.cancelled = True
            gateway.process.spawn(answer.generation.cancel("the client left"))

    def engines(self) -> list[SimulatedEngine]:
        """The engines that run."""
        return [m.service for m in self.members.values() if isinstance(m.service, SimulatedEngine)]

    def _make(
        self, kind: str, model: int, pipelined: bool = False, role: str = "both", address: str = "", **engine: Any
    ) -> Service:
        directory, name = self.model_dirs[model], self.models[model].name
        if kind == "gateway":
            return Gateway()
        if kind == "tokenizer":
            return SimulatedTokenizer(TokenizerSettings(model=directory, served_model_name=name))
        if kind == "detokenizer":
            return SimulatedDetokenizer(DetokenizerSettings(model=directory, served_model_name=name))
        flags = {"max_num_seqs": 16, "max_num_batched_tokens": 32, **self._flags}
        make = PipelinedHashWorker if pipelined else HashWorker
        # The engine tells its model's path: a directory's name would make runs differ.
        settings = EngineSettings(model=name or directory, served_model_name=name, role=role, **flags)
        address = address if role == "prefill" else ""
        return SimulatedEngine(
            settings, lambda _: make(model=self.models[model], waits=self.waits, **engine), self.network, address
        )


def worker_of(engine: SimulatedEngine) -> HashWorker:
    """What computes an engine's tokens."""
    executor = engine.engine._executor
    assert isinstance(executor, Executor)
    assert isinstance(executor.worker, HashWorker)
    return executor.worker


async def _edge(actor: GatewayActor, request: GenerationRequest, answer: Answer) -> None:
    """What the HTTP edge does with a request."""
    try:
        answer.generation = actor.backend.generate(request)
    except ServiceError as error:
        answer.error, answer.refused = error, True
        return
    answer.accepted_s = asyncio.get_running_loop().time()
    try:
        updates = answer.generation.updates()
        assert isinstance(updates, AsyncGenerator)
        async with aclosing(updates):
            async for batch in updates:
                for update in batch:
                    answer.add(update)
    except ServiceError as error:
        answer.error = error
    answer.ends += 1


def make_tokenizer(directory) -> str:
    """A byte-level tokenizer with one token for each byte and no merges: token i is byte i."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = {char: _byte(char) for char in alphabet}
    vocab = {char: byte_of[char] for char in alphabet}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "config.json").write_text("{}")
    return str(directory)


def _byte(char: str) -> int:
    code = ord(char)
    if code < 256:
        return code
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [b for b in range(256) if b not in printable][code - 256]


__all__ = ["Answer", "HashWorker", "Member", "Society", "make_tokenizer", "next_token"]
