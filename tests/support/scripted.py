"""The whole system in the test's process, with a model that says what a test wants.

The gateway with its HTTP edge, tokenizer, detokenizer and engine are real, on the in-process bus; only the worker that
computes tokens is a script. Its tokenizer has one token for each byte, and special tokens of the test's choice.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from antiphon.services.detokenizer.service import DetokenizerService
from antiphon.services.engine.core.plan import EngineFacts, SampledLogprobs, StepPlan, StepResult
from antiphon.services.engine.service import EngineService
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.tokenizer.service import TokenizerService
from antiphon.shared.actors.host import Host, Service
from antiphon.shared.actors.presence import HeartbeatTask, interval_of
from antiphon.shared.clock import SystemClock
from antiphon.shared.config import DetokenizerSettings, EngineSettings, TokenizerSettings
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.subjects import Subjects, new_instance_id
from tests.integration.edge import serving
from tests.sim.society import Gateway
from tests.support.memory import MemoryBus
from tests.tokenizer_files import token_id

END = "<|end|>"
"""The end token, which is special."""
NAME = "scripted"
Say = Callable[[str], str]
"""Returns what the model says after a prompt."""


def write_scripted_model(directory: Path, chat_template: str, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Writes the files of a model without weights; returns its tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (END, *special_tokens)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": chat_template}))
    (directory / "config.json").write_text("{}")
    return tokenizer


class ScriptedWorker:
    """Samples the tokens of what `say` returns for a prompt, and then the end token, whatever the parameters."""

    def __init__(
        self, tokenizer: Tokenizer, say: Say, end: str = END, num_blocks: int = 2000, max_model_len: int = 8000
    ) -> None:
        self._tokenizer = tokenizer
        self._say = say
        self._end = [token_id(tokenizer, end)]
        self._facts = EngineFacts(
            num_blocks=num_blocks,
            block_size=16,
            max_model_len=max_model_len,
            vocab_size=tokenizer.get_vocab_size(),
            eos_token_ids=frozenset(self._end),
        )
        self._left: dict[int, list[int]] = {}
        """Of each row, the tokens that are still to come."""

    def facts(self) -> EngineFacts:
        return self._facts

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.freed_rows:
            del self._left[row]
        for new in plan.new:
            prompt = self._tokenizer.decode(list(new.token_ids[: new.num_prompt_tokens]), skip_special_tokens=False)
            said = self._tokenizer.encode(self._say(prompt), add_special_tokens=False).ids
            # On a busy machine a sequence may be placed anew, with its output so far behind the prompt.
            self._left[new.row] = (said + self._end)[len(new.token_ids) - new.num_prompt_tokens :]
        sampled = tuple((self._left[one.row].pop(0),) for one in plan.scheduled if one.samples)
        return StepResult(step=plan.step, token_ids=sampled, logprobs=tuple((SampledLogprobs(-1.0),) for _ in sampled))

    def compile_grammar(self, grammar: Grammar) -> None:
        """Accepts every grammar: what the script says is the test's choice."""

    def close(self) -> None:
        self._left.clear()


@contextlib.asynccontextmanager
async def scripted_system(
    directory: Path, tokenizer: Tokenizer, say: Say, *, worker: ScriptedWorker | None = None, **settings: Any
) -> AsyncIterator[int]:
    """Runs the system until the end of the block; gives the port of its HTTP server.

    `worker`: another one than for the files of `write_scripted_model`. `settings`: of the gateway.
    """
    bus, subjects = MemoryBus(), Subjects()
    files: Any = {"model": str(directory), "served_model_name": NAME}
    worker = worker or ScriptedWorker(tokenizer, say)
    gateway = Gateway()
    services: list[Any] = [
        gateway,
        TokenizerService(TokenizerSettings(**files)),
        DetokenizerService(DetokenizerSettings(**files)),
        EngineService(EngineSettings(**files, canary_interval=0.0), lambda _: worker),
    ]
    ends = [await _started(service, bus, subjects) for service in services]
    actor: GatewayActor = gateway.actor
    while actor.backend.ready():
        await asyncio.sleep(0.01)
    backend: Any = actor.backend
    async with serving(backend, **settings) as port:
        yield port
    await actor.backend.drain()
    for end in reversed(ends):
        await end()


async def _started(service: Any, bus: MemoryBus, subjects: Subjects) -> Callable[[], Any]:
    """Starts a service and its heartbeats; returns what stops both."""
    transport = bus.connect(service.name, inbox_prefix=subjects.inbox(service.name, service.name))
    host = Host(
        transport=transport, subjects=subjects, clock=SystemClock(), id=service.name, instance_id=new_instance_id()
    )
    started: Service = service
    await started.start(host)
    run = asyncio.create_task(started.run())
    beats = HeartbeatTask(host, service, interval_s=interval_of(service.name))
    await beats.start("ready")

    async def stop() -> None:
        await beats.stop()
        if service.name != "gateway":
            await started.drain()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await transport.close()

    return stop
