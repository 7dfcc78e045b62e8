"""The transport on three servers: what is stored outlives one of them, and connections move to another one.

Nothing here has a time limit but the test as a whole: how long servers take to choose a leader depends on the machine.
"""

import asyncio
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from nats import errors

from antiphon.shared.bus.durable_log import LogConfig, LogUnavailableError
from antiphon.shared.bus.key_value import BucketConfig, Entry, KeyValueStore, StoreUnavailableError
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.errors import ServiceError
from tests.conftest import free_port, nats_server_binary

pytestmark = pytest.mark.nats
NUM_SERVERS = 3
T = TypeVar("T")


def _free_ports() -> list[int]:
    return [free_port() for _ in range(NUM_SERVERS)]


@dataclass
class Cluster:
    """Servers on this machine. `kill` is final.

    The first leader is chosen by all three: if one does not start, the others wait for it for ever.
    """

    folder: Path
    password: str = field(default_factory=lambda: secrets.token_hex(8))
    ports: list[int] = field(default_factory=_free_ports)
    routes: list[int] = field(default_factory=_free_ports)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Returns when all listen. A port that somebody else took in the meantime is given up with all others."""
        file = self.folder / "credentials"
        file.write_text(f"one:{self.password}")
        file.chmod(0o600)
        while not self._all_listen():
            self.end()
            self.processes.clear()
            self.ports, self.routes = _free_ports(), _free_ports()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(60)

    def _all_listen(self) -> bool:
        joined = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
        for number, (port, route) in enumerate(zip(self.ports, self.routes, strict=True)):
            config = self.folder / f"{number}.conf"
            config.write_text(
                f'server_name: n{number}\nlisten: "127.0.0.1:{port}"\n'
                f'authorization {{ users: [{{ user: "one", password: "{self.password}" }}] }}\n'
                f'jetstream {{ store_dir: "{self.folder}/{port}", max_memory_store: 64MB }}\n'
                f'cluster {{ name: c, listen: "127.0.0.1:{route}", routes: [{joined}], no_advertise: true }}\n'
            )
            with self._log(number).open("wb") as log:
                self.processes.append(subprocess.Popen([nats_server_binary(), "-c", str(config)], stderr=log))
        waiting = dict(enumerate(self.processes))
        while waiting:
            if any(process.poll() is not None for process in waiting.values()):
                return False
            waiting = {
                n: process for n, process in waiting.items() if "Server is ready" not in self._log(n).read_text()
            }
            time.sleep(0.01)
        return True

    def _log(self, number: int) -> Path:
        return self.folder / f"{number}.log"

    def kill(self, number: int) -> None:
        self.killed.add(number)
        self.processes[number].kill()
        self.processes[number].wait(60)

    def check(self) -> None:
        """Fails if a server that was not killed has ended."""
        for number, process in enumerate(self.processes):
            assert number in self.killed or process.poll() is None, self._log(number).read_text()

    async def until(self, work: Callable[[], Awaitable[T]], *failures: type[Exception]) -> T:
        """Repeats what fails while the servers choose a leader, and returns its result."""
        while True:
            try:
                return await work()
            except failures:
                self.check()
                await asyncio.sleep(0.1)

    async def written(self, store: KeyValueStore, value: bytes, revision: int) -> int:
        """Writes the entry `k` and returns its revision. An attempt without an answer may have written it."""

        async def write() -> int | None:
            written = await store.replace("k", value, revision)
            entry = await store.get("k") if written is None else None
            return entry.revision if entry is not None and entry.value == value else written

        written = await self.until(write, StoreUnavailableError)
        assert written is not None
        return written

    async def connect(self, *numbers: int) -> NatsTransport:
        urls = [f"nats://127.0.0.1:{self.ports[number]}" for number in numbers]
        file = str(self.folder / "credentials")
        return await NatsTransport.connect(urls, name="one", inbox_prefix="inbox", credentials=file)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.end()


@pytest.fixture
async def connections() -> AsyncIterator[list[NatsTransport]]:
    made: list[NatsTransport] = []
    yield made
    for transport in made:
        await transport.close()


async def test_what_is_stored_and_a_connection_outlive_a_server(
    cluster: Cluster, connections: list[NatsTransport]
) -> None:
    # Stores that were made with one copy get more from whoever wants them.
    one = await cluster.connect(0, 1, 2)
    connections.append(one)
    bucket = BucketConfig("b", 60.0)
    config = LogConfig(name="log", subject="log.*", storage="memory", max_age_s=60, max_bytes=2**20)
    # Whoever wants one copy takes none away.
    for replicas in (1, NUM_SERVERS, 1):
        for each in (bucket, config):
            await cluster.until(partial(one.make_store, each, replicas=replicas, timeout_s=2), ServiceError)
    store, log = one.key_value_store(bucket, timeout_s=2), one.durable_log(config, timeout_s=2)
    revision = await cluster.written(store, b"kept", 0)
    await cluster.until(log.open, LogUnavailableError)
    sequence = await cluster.until(lambda: log.append("log.a", b"kept"), LogUnavailableError)
    stream_info = one._client.jetstream().stream_info
    info = [await cluster.until(partial(stream_info, name), errors.Error) for name in ("KV_b", "log")]
    assert [each.config.num_replicas for each in info] == [3, 3]

    back = asyncio.Event()
    one.on_reconnect = back.set
    at = one._client.connected_url
    assert at is not None
    assert at.port is not None
    cluster.kill(cluster.ports.index(at.port))
    await back.wait()
    entry = await cluster.until(lambda: store.get("k"), StoreUnavailableError)
    assert entry == Entry(b"kept", revision)
    found = await cluster.until(lambda: log.last("log.a"), LogUnavailableError)
    assert found == (sequence, b"kept")
    assert await cluster.written(store, b"new", revision) > revision
    assert await cluster.until(lambda: log.append("log.a", b"new"), LogUnavailableError)

    # A process that starts now finds the servers that are left, wherever the dead one is in its list.
    late = await cluster.connect(0, 1, 2)
    connections.append(late)
    assert late.connected
