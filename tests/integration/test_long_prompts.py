"""Prompts of megabytes through all four services on a real bus: what they may have is counted in tokens, not in bytes.

The model is the simulation's; HTTP, bus, tokenizer and scheduler are the product's, all in the test's process.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.services.detokenizer.service import DetokenizerService
from antiphon.services.engine.service import EngineService
from antiphon.services.gateway.service import GatewayService
from antiphon.services.tokenizer.service import TokenizerService
from antiphon.shared.actors.host import Host, Service
from antiphon.shared.actors.presence import HeartbeatTask, interval_of
from antiphon.shared.clock import SystemClock
from antiphon.shared.config import DetokenizerSettings, EngineSettings, GatewaySettings, TokenizerSettings
from antiphon.shared.subjects import Subjects, new_instance_id
from tests.conftest import Connect, NatsServer
from tests.integration.edge import call
from tests.sim.society import HashWorker, make_tokenizer

pytestmark = pytest.mark.nats
CONTEXT = 2_000_000
BLOCK = 16


@pytest.fixture
async def port(
    nats_server: NatsServer, nats_connect: Connect, subjects: Subjects, tmp_path: Path, unused_port: int
) -> AsyncIterator[int]:
    """Where the gateway listens."""
    model = make_tokenizer(tmp_path)
    worker = HashWorker(num_blocks=CONTEXT // BLOCK + 1, block_size=BLOCK, max_model_len=CONTEXT)
    engine = EngineSettings(model=model, max_num_batched_tokens=100_000)
    services: list[Service] = [
        TokenizerService(TokenizerSettings(model=model)),
        DetokenizerService(DetokenizerSettings(model=model)),
        EngineService(engine, lambda _: worker),
        GatewayService(GatewaySettings(host="127.0.0.1", port=unused_port)),
    ]
    tasks: list[asyncio.Task[None]] = []
    for service in services:
        transport = await nats_connect(nats_server, service.name)
        host = Host(
            transport=transport, subjects=subjects, clock=SystemClock(), id=service.name, instance_id=new_instance_id()
        )
        await service.start(host)
        await transport.barrier()
        beats = HeartbeatTask(host, service, interval_s=interval_of(service.name))
        beats.set_state("ready")
        tasks += [asyncio.create_task(beats.run()), asyncio.create_task(service.run())]
    async with asyncio.timeout(60):
        while (await call(unused_port, "GET", "/readyz")).status != 200:
            await asyncio.sleep(0.02)
    yield unused_port
    for service in reversed(services):
        await service.drain()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def body(prompt: str | list[int], **more: object) -> dict[str, object]:
    return {"model": "default", "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}


@pytest.mark.matrix("B-14")
async def test_a_text_of_more_than_a_megabyte_and_a_half_is_served(port: int) -> None:
    text = "four " * 320_000
    reply = await call(port, "POST", "/v1/completions", body(text))
    assert reply.status == 200, reply.body[:500]
    assert reply.json["usage"]["prompt_tokens"] == len(text) == 1_600_000
    assert reply.json["usage"]["completion_tokens"] == 1


async def test_four_hundred_thousand_token_ids_are_served_and_echoed(port: int) -> None:
    ids = [32 + index % 90 for index in range(400_000)]
    reply = await call(port, "POST", "/v1/completions", body(ids, echo=True, return_token_ids=True))
    assert reply.status == 200, reply.body[:500]
    assert reply.json["usage"]["prompt_tokens"] == 400_000
    choice = reply.json["choices"][0]
    assert len(choice["token_ids"]) == 1
    assert choice["text"].startswith(bytes(ids).decode())


@pytest.mark.matrix("B-14")
@pytest.mark.parametrize("as_ids", [True, False])
async def test_a_prompt_beyond_the_context_is_refused_in_tokens(port: int, as_ids: bool) -> None:
    prompt = [65] * (CONTEXT + 5) if as_ids else "a" * (CONTEXT + 5)
    reply = await call(port, "POST", "/v1/completions", body(prompt))
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT} tokens" in reply.error["message"]
    assert f"your prompt resulted in {CONTEXT + 5} tokens" in reply.error["message"]
