"""All four real actors in one process on the in-process bus, in virtual time. For the simulation tests.

Two parts are not the product's: the model, because a simulation must be exact (`HashWorker`: the next token is a hash
of everything before it), and the engine's driver, because a thread has no virtual time (`TaskLoop`).
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.detokenizer.service import DetokenizerService
from services.engine.core.invariants import check as check_core
from services.engine.core.plan import EngineFacts, SampledLogprobs, StepPlan, StepResult
from services.engine.engine import Engine
from services.engine.loop import StepLoop
from services.engine.service import EngineService
from services.gateway.actor import GatewayActor
from services.gateway.generation import GenerationRequest, SequenceUpdate
from services.tokenizer.service import TokenizerService
from shared.actors.host import Host, Service
from shared.actors.memory import MemoryBus
from shared.actors.presence import HeartbeatTask, interval_of
from shared.actors.simulation import SimClock
from shared.config import DetokenizerSettings, EngineSettings, TokenizerSettings
from shared.errors import ServiceError
from shared.subjects import Subjects, new_boot

VOCABULARY = 256
EOS = 0
STEP_S = 0.01


class HashWorker:
    """A model without arithmetic. It keeps the state table as a real worker does, so wrong plans show."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 128) -> None:
        self._facts = EngineFacts(num_blocks, block_size, max_model_len, VOCABULARY, frozenset({EOS}))
        self._rows: dict[int, list[int]] = {}
        self._salts: dict[int, int] = {}
        self.num_computed = 0

    def facts(self) -> EngineFacts:
        return self._facts

    def run(self, plan: StepPlan) -> StepResult:
        self.num_computed += plan.num_tokens
        for row in plan.freed_rows:
            del self._rows[row]
        for new in plan.new:
            self._rows[new.row] = list(new.token_ids)
            self._salts[new.row] = new.params.seed if new.params.temperature else 0
        sampled = []
        for scheduled in plan.scheduled:
            if scheduled.samples:
                tokens = self._rows[scheduled.row]
                assert scheduled.start + scheduled.num_tokens == len(tokens)
                token = next_token(tokens, self._salts[scheduled.row])
                tokens.append(token)
                sampled.append((token,))
        logprobs = tuple((SampledLogprobs(-1.0),) for _ in sampled)
        return StepResult(plan.step, tuple(sampled), logprobs)

    def close(self) -> None:
        self._rows.clear()


def next_token(tokens: list[int], salt: int) -> int:
    """Never EOS, so that lengths are known."""
    digest = hashlib.sha256(f"{salt}/{tokens}".encode()).digest()
    return 32 + digest[0] % 90


class TaskLoop:
    """Drives a StepLoop from a task, each step taking virtual time."""

    def __init__(self, steps: StepLoop, on_exit: Callable[[BaseException | None], None]) -> None:
        self._steps = steps
        self._on_exit = on_exit
        self._stopping = False
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        self._stopping = True

    async def join(self, timeout_s: float) -> None:
        await asyncio.wait_for(self._task, timeout_s)

    async def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._stopping:
                self._steps.step()
                check_core(self._steps.core)
                await asyncio.sleep(STEP_S)
        except asyncio.CancelledError:
            return
        except BaseException as failure:
            error = failure
        self._on_exit(error)


class SimulatedEngine(EngineService):
    """The engine service without threads."""

    async def _build(self, clock):
        return Engine.build(self._settings, self._reports.put, clock=clock, make_worker=self._make_worker)

    def _drive(self):
        self.driver = TaskLoop(self.engine.loop, self._on_exit)
        return self.driver


@dataclass
class Member:
    """One running service."""

    name: str
    service: Service
    host: Host
    tasks: list[asyncio.Task] = field(default_factory=list)


@dataclass
class Answer:
    """What a client of the society got."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    error: ServiceError | None = None
    ends: int = 0

    def add(self, update: SequenceUpdate) -> None:
        assert update.index not in self.finish, "an update after the end"
        self.texts[update.index] = self.texts.get(update.index, "") + update.text
        self.token_ids.setdefault(update.index, []).extend(update.token_ids)
        if update.finish_reason:
            self.finish[update.index] = update.finish_reason


class Gateway:
    """The gateway's actor without its HTTP edge, as a Service."""

    name = "gateway"

    async def start(self, host: Host) -> None:
        self.actor = GatewayActor(host)
        await self.actor.listen()
        self._tasks = [asyncio.create_task(self.actor.run()), asyncio.create_task(self.actor.watch())]

    def status(self):
        return self.actor.status()

    async def run(self) -> None:
        await asyncio.gather(*self._tasks)

    async def drain(self) -> None:
        await self.actor.drain()


class Society:
    """A deployment: starts members, breaks them, asks it things."""

    def __init__(self, model_dir: str, seed: int = 0, **flags: Any) -> None:
        self.bus = MemoryBus(seed, (0.0001, 0.002))
        self.model_dir = model_dir
        self.members: dict[str, Member] = {}
        self.subjects = Subjects()
        self._numbers = 0
        self._seed = seed
        self._flags = flags

    async def start(self, kind: str, name: str = "", **engine: object) -> Member:
        """Starts a replica; its id is its name."""
        name = name or f"{kind}{sum(m.service.name == kind for m in self.members.values())}"
        transport = self.bus.connect(name)
        service = self._make(kind, **engine)
        host = Host(transport, self.subjects, SimClock(), name, self._boot())
        await service.start(host)
        await transport.barrier()
        member = Member(name, service, host)
        beats = HeartbeatTask(host, service, interval_s=interval_of(service.name))
        beats.set_state("ready")
        member.tasks = [asyncio.create_task(beats.run()), asyncio.create_task(service.run())]
        self.members[name] = member
        return member

    def kill(self, name: str) -> None:
        """kill -9: nothing it says is heard any more, and it hears nothing."""
        member = self.members.pop(name)
        self.bus.crash(name)
        for task in asyncio.all_tasks():
            if task in member.tasks:
                task.cancel()
        service = member.service
        if isinstance(service, SimulatedEngine):
            service.driver.stop()

    async def ready(self) -> Gateway:
        """Waits until the first gateway sees one of everything."""
        gateway = next(m.service for m in self.members.values() if isinstance(m.service, Gateway))
        while gateway.actor.ready():
            await asyncio.sleep(0.01)
        return gateway

    async def ask(self, request: GenerationRequest, gateway: str = "gateway0") -> Answer:
        """One request to its end."""
        service = self.members[gateway].service
        assert isinstance(service, Gateway)
        answer = Answer()
        try:
            async for batch in service.actor.generate(request).updates():
                for update in batch:
                    answer.add(update)
        except ServiceError as error:
            answer.error = error
        answer.ends += 1
        return answer

    def engines(self) -> list[SimulatedEngine]:
        """The engines that run."""
        return [m.service for m in self.members.values() if isinstance(m.service, SimulatedEngine)]

    def _make(self, kind: str, **engine: object) -> Service:
        if kind == "gateway":
            return Gateway()
        if kind == "tokenizer":
            return TokenizerService(TokenizerSettings(model=self.model_dir))
        if kind == "detokenizer":
            return DetokenizerService(DetokenizerSettings(model=self.model_dir))
        flags = {"max_num_seqs": 16, "max_num_batched_tokens": 32, **self._flags}
        settings = EngineSettings(model=self.model_dir, **flags)
        return SimulatedEngine(settings, lambda _: HashWorker(**engine))

    def _boot(self) -> str:
        self._numbers += 1
        return f"{self._numbers:08x}"


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


__all__ = ["Answer", "HashWorker", "Society", "make_tokenizer", "new_boot", "next_token"]
