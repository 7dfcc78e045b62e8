"""Gateways follow the prefix caches of engines: all actors in virtual time, also with lost messages."""

import asyncio

import pytest

from antiphon.services.gateway.guests.prefix_caches.guest import PrefixCaches
from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.shared import limits
from antiphon.shared.blocks import block_name
from antiphon.shared.parameters.sampling import SamplingParams
from tests.sim.society import Member, Society, make_tokenizer
from tests.support.simulation import run_simulation

PREFIX = f"antiphon.v{limits.PROTOCOL_VERSION}."
AGREE_S = 1.0
LENGTH = 40


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def request(number: int) -> GenerationRequest:
    prompt = tuple(f"{number % 7:08d}{'x' * LENGTH}{number:04d}".encode())
    return GenerationRequest(
        request_id=f"r{number}",
        model="",
        params=SamplingParams(max_tokens=3, temperature=0.0),
        inputs=PromptInputs(token_ids=(prompt,)),
    )


def known(gateway: Member) -> dict[str, set[int]]:
    """The blocks of each engine that a gateway follows, as it knows them."""
    followers = gateway.service.guests[PrefixCaches].followers
    return {engine.id: set(one.known.present) for engine, one in followers.items() if one.is_synced}


def truth(society: Society) -> dict[str, set[int]]:
    """The blocks that each engine has."""
    return {
        name: {block_name(one) for one in member.service.engine._core.pool.content()}
        for name, member in society.members.items()
        if member.kind == "engine"
    }


async def start(model_dir: str, engines: int, **flags) -> Society:
    society = Society(model_dir, **flags)
    for kind in ("gateway", "tokenizer", "detokenizer", *["engine"] * engines):
        await society.start(kind)
    await society.ready()
    await asyncio.sleep(2 * limits.HEARTBEAT_INTERVAL_S)  # until all engines are heard of
    return society


async def until_equal(society: Society, *gateways: str) -> None:
    async with asyncio.timeout(AGREE_S):
        while any(known(society.members[name]) != truth(society) for name in gateways):
            await asyncio.sleep(0.01)


async def serve(society: Society, first: int, count: int, gateway: str = "gateway0") -> None:
    answers = await asyncio.gather(*(society.ask(request(first + n), gateway) for n in range(count)))
    assert not [answer.error for answer in answers if answer.error]


def test_a_gateway_knows_what_engines_have_and_a_late_one_agrees_within_a_second(model_dir):
    async def scenario() -> None:
        society = await start(model_dir, 2)
        await serve(society, 0, 30)
        await until_equal(society, "gateway0")
        assert all(truth(society).values()), "no engine has any block: the test shows nothing"
        await society.start("gateway")
        await until_equal(society, "gateway0", "gateway1")
        await serve(society, 100, 200, "gateway1")  # more blocks than the engines have: some are evicted
        await until_equal(society, "gateway0", "gateway1")

    run_simulation(scenario, 1)


@pytest.mark.parametrize("seed", range(4))
def test_lost_and_late_events_are_asked_for_again(model_dir, seed):
    async def scenario() -> None:
        society = await start(model_dir, 2, seed=seed)
        lost = society.bus.drop(f"{PREFIX}blk.>", 0.5)
        late = society.bus.delay(f"{PREFIX}blk.>", 0.0, 0.3)
        for first in range(0, 160, 8):
            await serve(society, first, 8)
        lost.remove()
        late.remove()
        followers = society.members["gateway0"].service.guests[PrefixCaches].followers
        assert sum(one.num_gaps for one in followers.values()), "no gap: the test shows nothing"
        await asyncio.sleep(limits.BLOCK_RENEWAL_S)
        await until_equal(society, "gateway0")

    run_simulation(scenario, seed)


def test_the_last_event_is_not_missed_for_ever_and_a_restarted_engine_is_followed_anew(model_dir):
    async def scenario() -> None:
        society = await start(model_dir, 2)
        await serve(society, 0, 10)
        await until_equal(society, "gateway0")
        lost = society.bus.drop(f"{PREFIX}blk.>")
        await serve(society, 100, 10)
        lost.remove()
        assert known(society.members["gateway0"]) != truth(society)
        await asyncio.sleep(limits.BLOCK_RENEWAL_S)
        await until_equal(society, "gateway0")
        society.kill("engine1")
        await society.start("engine", "engine1")
        await asyncio.sleep(2 * limits.LEASE_S)
        await until_equal(society, "gateway0")

    run_simulation(scenario, 1)


def test_with_one_engine_nothing_is_asked_sent_or_collected(model_dir):
    async def scenario() -> None:
        society = await start(model_dir, 1)
        sent: list[str] = []
        society.bus.drop(
            f"{PREFIX}>", lambda delivery: bool(".blk" in delivery.subject and sent.append(delivery.subject))
        )
        await serve(society, 0, 20)
        await asyncio.sleep(3 * limits.BLOCK_RENEWAL_S)
        assert sent == []
        (engine,) = society.engines()
        assert engine.engine._core.pool.watchers == ()
        assert not society.members["gateway0"].service.guests[PrefixCaches].followers

    run_simulation(scenario, 1)


def test_an_engine_collects_nothing_when_its_followers_are_gone(model_dir):
    async def scenario() -> None:
        society = await start(model_dir, 2)
        await serve(society, 0, 10)
        await until_equal(society, "gateway0")
        assert all(engine.engine._core.pool.watchers for engine in society.engines())
        society.kill("gateway0")
        await asyncio.sleep(limits.BLOCK_LEASE_S + 1)
        assert [engine.engine._core.pool.watchers for engine in society.engines()] == [(), ()]
        assert [engine.blocks.is_followed for engine in society.engines()] == [False, False]

    run_simulation(scenario, 1)


def test_prompts_go_where_another_gateway_has_sent_their_prefix(model_dir):
    async def scenario() -> None:
        society = await start(model_dir, 2)
        await society.start("gateway")
        await asyncio.sleep(1)
        for number in range(7):
            await serve(society, number, 1, "gateway0")
        await until_equal(society, "gateway0", "gateway1")
        before = [engine.engine.counters().cached_tokens for engine in society.engines()]
        for number in range(7, 14):
            await serve(society, number, 1, "gateway1")
        after = [engine.engine.counters().cached_tokens for engine in society.engines()]
        assert sum(after) - sum(before) == 7 * (8 + LENGTH) // 16 * 16

    run_simulation(scenario, 1)
