"""Gateways know what the prefix caches of engines have: real processes on a real bus."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.conftest import NatsServer, free_port
from tests.system.served import ROOT, Served, Started, fetch, fetch_url, serve_tiny, until_the_end, wait_until

AGREE_S = 1.0
SLACK_S = 4.0
"""For a machine that is busy with other tests."""
KNOWN = re.compile(r'^antiphon:prefix_cache_known_blocks\{engine="([^"]+)"\} (\S+)$', re.MULTILINE)
POSITION = re.compile(r'^antiphon:prefix_cache_position\{engine="([^"]+)"\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def bus(nats_server: NatsServer) -> tuple[str, ...]:
    credentials = f"--nats-credentials={nats_server.credentials}"
    return f"--nats={nats_server.url}", credentials, f"--namespace=test-{os.getpid()}-prefixes"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('events')}/kv"


@pytest.fixture(scope="module")
def served(model: Path, bus: tuple[str, ...], endpoint: str) -> Iterator[Served]:
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint})
    with until_the_end(serve_tiny(model, *bus, "--engines=2", f"--kv-events-config={events}")) as started:
        yield started


def known(port: int) -> dict[str, tuple[str, ...]]:
    """Blocks and position of each engine, as the gateway at this port tells them."""
    text = fetch_url("GET", f"http://127.0.0.1:{port}/metrics").body.decode()
    positions = dict(POSITION.findall(text))
    return {engine: (blocks, positions[engine]) for engine, blocks in KNOWN.findall(text)}


def ask(served: Served, number: int) -> None:
    body = {"model": "tiny", "prompt": [7 + number] * 200, "max_tokens": 4, "temperature": 0}
    answer = fetch(served, "POST", "/v1/completions", body)
    assert answer.status == 200, answer.body


def test_each_engine_publishes_its_kv_events_for_other_routers(served: Served, endpoint: str):
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        socket.connect(f"{endpoint}_dp1")
        found = list[int]()
        for number in range(50):  # the first come before the subscription
            ask(served, 50 + number)
            while socket.poll(50):
                _, events, _ = msgspec.msgpack.decode(socket.recv_multipart()[2])
                found += [event["token_ids"][0] for event in events if event["type"] == "BlockStored"]
            if found:
                break
    assert set(found) <= set(range(57, 107))
    assert found


def test_a_gateway_that_starts_late_agrees_with_the_first_within_a_second(served: Served, bus: tuple[str, ...]):
    for number in range(20):
        ask(served, number)
    wait_until(lambda: sum(float(blocks) for blocks, _ in known(served.port).values()) >= 20, 10)
    assert len(known(served.port)) == 2
    port = free_port()
    command = [sys.executable, "-m", "antiphon.services.gateway", *bus, "--service-id=late"]
    late = Started([*command, "--host=127.0.0.1", f"--port={port}"], os.environ, ROOT)

    def agree() -> bool:
        found = known(port)
        return len(found) == 2 and found == known(served.port)

    def told() -> str:
        return f"{known(port)} {known(served.port)} {late.output}"

    try:
        wait_until(lambda: is_live(port), 60, lambda: late.output)
        wait_until(agree, AGREE_S + SLACK_S, told)
        for number in range(20, 40):
            ask(served, number)
        # Both get the same events, though only one of them sends prompts.
        wait_until(agree, AGREE_S + SLACK_S, told)
        engines = [pid for name, pid in served.pids().items() if "-engine-" in name]
        os.kill(engines[0], signal.SIGKILL)
        wait_until(lambda: len(known(port)) < 2, 10, told)
        wait_until(agree, 60, told)
    finally:
        late.stop()


def is_live(port: int) -> bool:
    try:
        return fetch_url("GET", f"http://127.0.0.1:{port}/livez").status == 200
    except OSError:
        return False
