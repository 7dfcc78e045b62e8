"""The transport on three servers: what is stored outlives one of them, and connections move to another one."""

import asyncio
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared.actors.durable_log import LogConfig, LogUnavailableError
from shared.actors.key_value import StoreUnavailableError
from shared.actors.nats import NatsTransport
from tests.conftest import free_port, nats_server_binary

pytestmark = pytest.mark.nats
NUM_SERVERS, ELECTED_S = 3, 30.0


@dataclass
class Cluster:
    """Servers on this machine. `kill` is final."""

    folder: Path
    password: str = field(default_factory=lambda: secrets.token_hex(8))
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(NUM_SERVERS)])
    routes: list[int] = field(default_factory=lambda: [free_port() for _ in range(NUM_SERVERS)])
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        joined = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
        for number, (port, route) in enumerate(zip(self.ports, self.routes, strict=True)):
            config = self.folder / f"{number}.conf"
            config.write_text(
                f'server_name: n{number}\nlisten: "127.0.0.1:{port}"\n'
                f'authorization {{ users: [{{ user: "one", password: "{self.password}" }}] }}\n'
                f'jetstream {{ store_dir: "{self.folder}/{number}", max_memory_store: 64MB }}\n'
                f'cluster {{ name: c, listen: "127.0.0.1:{route}", routes: [{joined}], no_advertise: true }}\n'
            )
            self.processes.append(
                subprocess.Popen([nats_server_binary(), "-c", str(config)], stderr=subprocess.DEVNULL)
            )
        file = self.folder / "credentials"
        file.write_text(f"one:{self.password}")
        file.chmod(0o600)

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait(10)

    async def connect(self, *numbers: int, replicas: int = NUM_SERVERS) -> NatsTransport:
        urls = [f"nats://127.0.0.1:{self.ports[number]}" for number in numbers]
        file = str(self.folder / "credentials")
        return await NatsTransport.connect(urls, name="one", inbox_prefix="inbox", credentials=file, replicas=replicas)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait(10)


@pytest.fixture
async def connections() -> AsyncIterator[list[NatsTransport]]:
    made: list[NatsTransport] = []
    yield made
    for transport in made:
        await transport.close()


async def until(work, *failures: type[Exception]):
    """Repeats what fails while the servers choose a leader, and returns its result."""
    deadline = time.monotonic() + ELECTED_S
    while True:
        try:
            return await work()
        except failures:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_what_is_stored_and_a_connection_outlive_a_server(
    cluster: Cluster, connections: list[NatsTransport]
) -> None:
    # Stores that were created with one copy get more from whoever wants them.
    single = await cluster.connect(1, replicas=1)
    connections.append(single)
    config = LogConfig(name="log", subject="log.*", storage="memory", max_age_s=60, max_bytes=2**20)
    await until(lambda: single.key_value_store("b", ttl_s=60, timeout_s=2).get("k"), StoreUnavailableError)
    await until(single.durable_log(config, timeout_s=2).open, LogUnavailableError)
    one = await cluster.connect(0, 1, 2)
    connections.append(one)
    store, log = one.key_value_store("b", ttl_s=60, timeout_s=2), one.durable_log(config, timeout_s=2)
    revision = await until(lambda: store.replace("k", b"kept", 0), StoreUnavailableError)
    await until(log.open, LogUnavailableError)
    sequence = await until(lambda: log.append("log.a", b"kept"), LogUnavailableError)
    # Whoever wants one copy takes none away.
    await single.durable_log(config, timeout_s=2).open()
    info = [await one._client.jetstream().stream_info(name) for name in ("KV_b", "log")]
    assert [each.config.num_replicas for each in info] == [3, 3]

    back = asyncio.Event()
    one.on_reconnect = back.set
    at = one._client.connected_url
    assert at is not None
    assert at.port is not None
    cluster.kill(cluster.ports.index(at.port))
    async with asyncio.timeout(20):
        await back.wait()
    entry = await until(lambda: store.get("k"), StoreUnavailableError)
    assert entry == type(entry)(b"kept", revision)
    found = await until(lambda: log.last("log.a"), LogUnavailableError)
    assert found == (sequence, b"kept")
    assert await until(lambda: store.replace("k", b"new", revision), StoreUnavailableError)
    assert await until(lambda: log.append("log.a", b"new"), LogUnavailableError)

    # A process that starts now finds the servers that are left, wherever the dead one is in its list.
    late = await cluster.connect(0, 1, 2)
    connections.append(late)
    assert late.connected
