"""Engines that sleep and wake among requests, in virtual time: no request is lost, and every token is the right one."""

import asyncio
import random

import pytest

from antiphon.shared import limits
from antiphon.shared.actors.actor import ask
from antiphon.shared.codec import Decoder
from antiphon.shared.messages import Ack, ErrorReply, Sleep, Wake
from tests.sim.society import Society
from tests.sim.test_society import check, greedy, model_dir, settled
from tests.support.simulation import run_simulation
from tests.support.slow import slow_but

__all__ = ["model_dir"]
ACK = Decoder([Ack, ErrorReply])


def simulate(model_dir, scenario, seed=0, engines=1, gateways=1, **flags):
    async def main():
        society = Society(model_dir, seed, **flags)
        for kind, count in (("gateway", gateways), ("tokenizer", 1), ("detokenizer", 1), ("engine", engines)):
            for _ in range(count):
                await society.start(kind)
        await society.ready()
        await asyncio.sleep(2 * limits.HEARTBEAT_INTERVAL_S)  # until every gateway has heard of all
        await scenario(society)
        for engine in society.engines():
            await order(society, engine, Wake())
        await until(society, lambda: all(engine._engine is not None for engine in society.engines()))
        for engine in society.engines():
            engine._sleeper._after_s = 0.0
        await settled(society)
        return society.bus.fingerprint

    return run_simulation(main, seed)


async def order(society: Society, engine, message) -> None:
    host = engine.actor._host
    subject = society.subjects.engine_control(host.id, host.instance_id)
    gateway = society.members["gateway0"].host
    assert isinstance(await ask(gateway.transport, subject, message, ACK, timeout_s=limits.OPEN_TIMEOUT_S), Ack)


async def until(society: Society, condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


async def asked(society: Society, number: int, after_s: float, gateway: str) -> None:
    await asyncio.sleep(after_s)
    check(await society.ask(greedy(number), gateway), number)


@pytest.mark.parametrize("seed", slow_but([0, 1], range(12)))
def test_engines_fall_asleep_between_requests_and_none_is_lost(model_dir, seed):
    async def scenario(society: Society) -> None:
        chance = random.Random(seed)
        # The pauses are about as long as the time until the engines fall asleep, so that both meet.
        at, work = 0.0, []
        for number in range(30):
            at += chance.choice([0.0, 0.05, chance.uniform(0.2, 0.8), chance.uniform(0.4, 0.9)])
            work.append(asked(society, number, at, f"gateway{chance.randrange(2)}"))
        await asyncio.gather(*work)
        assert sum(engine._sleeper.status().num_wakes for engine in society.engines()) > 1

    simulate(model_dir, scenario, seed, engines=1 + seed % 2, gateways=2, sleep_after=0.2, sleep_level=1 + seed % 2)


@pytest.mark.parametrize(("mode", "seed"), slow_but(["keep"], [(m, s) for s in range(3) for m in ("keep", "wait")]))
def test_engines_are_put_to_sleep_and_woken_in_the_middle_of_streams(model_dir, mode, seed):
    async def scenario(society: Society) -> None:
        chance = random.Random(seed)
        work = asyncio.gather(*(asked(society, n, chance.uniform(0, 4), "gateway0") for n in range(24)))
        while not work.done():
            engine = chance.choice(society.engines())
            await order(society, engine, Sleep(chance.choice([1, 2]), mode, chance.random() < 0.5))
            await asyncio.sleep(chance.uniform(0, 0.5))
            await order(society, engine, Wake())
            await asyncio.sleep(chance.uniform(0, 0.3))
        await work

    simulate(model_dir, scenario, seed, engines=2)


def test_an_engine_that_an_operator_has_put_to_sleep_waits_for_an_operator(model_dir):
    async def scenario(society: Society) -> None:
        (engine,) = society.engines()
        await order(society, engine, Sleep())
        await until(society, lambda: engine._sleeper.status().level > 0)
        request = asyncio.create_task(asked(society, 0, 0.0, "gateway0"))
        # Longer than a request waits for an engine that is not there.
        await asyncio.sleep(2 * limits.QUEUE_WAIT_S)
        assert not request.done()
        assert engine._sleeper.status().level > 0
        await order(society, engine, Wake())
        await request

    simulate(model_dir, scenario)


def test_abort_ends_the_streams_with_an_error_that_tells_why(model_dir):
    async def scenario(society: Society) -> None:
        (engine,) = society.engines()
        request = asyncio.create_task(society.ask(greedy(0, max_tokens=200)))
        await until(society, lambda: engine.actor.sequences.num_live == 1)
        await order(society, engine, Sleep(1, "abort"))
        answer = await request
        assert answer.error is not None
        assert "put to sleep" in answer.error.message

    simulate(model_dir, scenario)
