"""The whole system over connections to the bus that are slow, or that are reset again and again."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from antiphon.chaos.streams import Answer, Known, ask, compare, learn, make_bodies
from antiphon.launch.readiness import ServerAddress
from tests.conftest import NatsServer
from tests.support.tcp_proxy import TcpProxy
from tests.system.served import Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]
STREAMS = 6
HEARTBEATS_S = 1.5
"""Time after which the gateway knows the engines' counters, seconds."""


@pytest.fixture(scope="module")
def proxy(nats_server: NatsServer) -> Iterator[TcpProxy]:
    made = TcpProxy(nats_server.port)
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def served(model: Path, nats_server: NatsServer, proxy: TcpProxy) -> Iterator[Served]:
    bus = (f"--nats=nats://127.0.0.1:{proxy.port}", f"--nats-credentials={nats_server.credentials}")
    with until_the_end(serve_tiny(model, *bus, "--namespace=bad-links", "--engines=2")) as started:
        yield started


@pytest.fixture
async def known(served: Served, proxy: TcpProxy) -> AsyncIterator[list[Known]]:
    """Answers over a good link; the link is good again at the end."""
    address = ServerAddress(host="127.0.0.1", port=served.port)
    yield [await learn(address, body, 60) for body in make_bodies("tiny", STREAMS, 120, seed=1)]
    proxy.delay_s = proxy.jitter_s = proxy.bytes_per_s = 0.0


async def _again(served: Served, known: list[Known]) -> list[Answer]:
    address = ServerAddress(host="127.0.0.1", port=served.port)
    return list(await asyncio.gather(*(ask(address, one.body, Answer()) for one in known)))


def _generated(served: Served) -> int:
    members = json.loads(fetch(served, "GET", "/admin/topology").body)["members"]
    return sum(one["load"]["generation_tokens"] for one in members if one["service"] == "engine")


@pytest.mark.matrix("B-12")
async def test_a_slow_and_narrow_link_loses_nothing_and_nobody_is_taken_for_dead(
    served: Served, proxy: TcpProxy, known: list[Known]
):
    # Beside other tests, an engine that gets no processor for a second is taken for dead with good reason.
    computed_twice = [await _num_repeated_by_a_slow_link(served, proxy, known)]
    while computed_twice[-1] and len(computed_twice) < 3:
        computed_twice.append(await _num_repeated_by_a_slow_link(served, proxy, known))
    assert computed_twice[-1] == 0, computed_twice


async def _num_repeated_by_a_slow_link(served: Served, proxy: TcpProxy, known: list[Known]) -> int:
    """Checks the answers through a slow link. Returns how many tokens the engines computed more than once."""
    await asyncio.sleep(HEARTBEATS_S)
    before, delayed = await asyncio.to_thread(_generated, served), proxy.delayed
    proxy.delay_s, proxy.jitter_s, proxy.bytes_per_s = 0.05, 0.03, 125_000
    answers = await _again(served, known)
    assert proxy.delayed > delayed, "the link was slow"
    for one, answer in zip(known, answers, strict=True):
        assert not answer.problem
        assert not compare(one.token_ids, answer.token_ids)
        assert answer.text == one.text
    proxy.delay_s = proxy.jitter_s = proxy.bytes_per_s = 0.0
    tokens = sum(len(one.token_ids) for one in known)
    await asyncio.to_thread(wait_until, lambda: _generated(served) >= before + tokens, 20)
    await asyncio.sleep(HEARTBEATS_S)
    return await asyncio.to_thread(_generated, served) - before - tokens


@pytest.mark.matrix("B-11")
async def test_links_that_are_reset_again_and_again_lose_nothing(served: Served, proxy: TcpProxy, known: list[Known]):
    resets, connections, hit, complete = proxy.resets, proxy.connections, 0, 0
    for round_number in range(4):
        asked = asyncio.create_task(_again(served, known))
        await asyncio.sleep(0.1 + 0.05 * round_number)
        hit += not asked.done()
        proxy.reset_all()
        for one, answer in zip(known, await asked, strict=True):
            if answer.refused_s is not None:  # the bus was away at that moment: the client is told to come back
                continue
            assert not answer.problem
            assert not compare(one.token_ids, answer.token_ids)
            complete += 1
        await asyncio.to_thread(wait_until, lambda: fetch(served, "GET", "/readyz").status == 200, 20)
    assert hit, "streams were under way"
    assert complete
    assert proxy.resets > resets
    assert proxy.connections > connections
