"""docker-compose.yml with infra/docker/cluster.yml: three NATS servers, one of which is killed under streams.

Needs Docker and docker-compose; run by `make container-test`, never by `make test`.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.container.stack import RESTART_S, Stack, demo_model, load, run, started, wait_until

SERVERS = ("nats", "nats-2", "nats-3")
pytestmark = [pytest.mark.container, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = demo_model(tmp_path_factory.mktemp("model"))
    with started(model, files=["infra/docker/cluster.yml"], replicas=1) as made:
        yield made


def monitored(container: str, path: str) -> Any:
    """What a NATS server says on its port for inspection, which only its own container reaches."""
    return json.loads(run("docker", "exec", container, "wget", "-q", "-O", "-", f"http://127.0.0.1:8222/{path}"))


def peers(container: str) -> dict[str, list[bool]]:
    """The streams that a server knows, and of each whether every other copy is up to date."""
    [account] = monitored(container, "jsz?accounts=true&streams=true")["account_details"]
    streams = account["stream_detail"]
    return {one["name"]: [copy["current"] for copy in one["cluster"].get("replicas", ())] for one in streams}


def server_of_gateway(stack: Stack) -> str:
    """The name of the NATS server to which the gateway is connected."""
    for name in SERVERS:
        [container] = stack.containers(name)
        connections = monitored(container, "connz?auth=true")["connections"]
        if any(one.get("authorized_user") == "gateway" for one in connections):
            return name
    raise AssertionError("the gateway is connected to none of the servers")


def test_every_stream_has_a_copy_on_each_of_the_three_servers(stack: Stack) -> None:
    for name in SERVERS:
        [container] = stack.containers(name)
        found = peers(container)
        assert {"antiphon-v3-streams", "antiphon-v3-stream-tokens"} <= set(found), found
        assert all(len(copies) == 2 for copies in found.values()), found


async def test_a_killed_server_of_the_bus_changes_no_stream(stack: Stack) -> None:
    expected = await load(stack.gateways(), 8)
    victim = server_of_gateway(stack)
    [container] = stack.containers(victim)
    starts = stack.starts(container)
    # While the gateway connects to another server it refuses new requests with 503, and the client asks again.
    texts = await load(stack.gateways(), 32, during=lambda: stack.kill(container), max_retries=5)
    assert len(texts) == 48
    assert texts == [expected[n % 8] for n in range(48)]
    assert stack.starts(container) == starts + 1
    await asyncio.to_thread(wait_until, lambda: stack.healthy(victim) == 1, RESTART_S, stack.describe)
    copies = peers(container)
    assert "antiphon-v3-streams" in copies, "the server is back with its copies"
    await asyncio.to_thread(stack.wait_until_healthy, RESTART_S)
