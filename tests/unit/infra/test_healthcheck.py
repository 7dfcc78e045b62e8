"""The containers' health check against a real bus: well means a heartbeat that says ready, and nothing else does."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.gateway.app import create_app
from antiphon.services.gateway.edge.http.server.uvicorn_server import Server, server_config
from antiphon.shared import codec
from antiphon.shared.config import GatewaySettings
from antiphon.shared.messages import PoolStatus, ServiceState
from antiphon.shared.subjects import Subjects
from infra.docker import healthcheck
from tests.integration.edge import ScriptedBackend
from tests.support.heartbeats import heartbeat

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.nats
Check = Callable[..., Awaitable[tuple[int, str]]]
RUN = "import sys; from infra.docker import healthcheck; healthcheck.TIMEOUT_S = {}; sys.exit(healthcheck.main())"


@pytest.fixture
def check(nats_server: Any, namespace: str) -> Check:
    """`await check(service)` gives exit code and output, as Docker sees them. It waits as long as the test may take."""
    environ = {
        "PYTHONPATH": str(ROOT),
        "ANTIPHON_NATS": nats_server.url,
        "ANTIPHON_NATS_CREDENTIALS": nats_server.credentials,
        "ANTIPHON_NAMESPACE": namespace,
    }

    async def run(service: str, timeout_s: float = 200.0) -> tuple[int, str]:
        argv = [sys.executable, "-c", RUN.format(timeout_s), service]
        process = await asyncio.create_subprocess_exec(
            *argv, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    return run


@asynccontextmanager
async def beating(transport: Any, subjects: Subjects, member_id: str, state: ServiceState) -> AsyncIterator[None]:
    """A member that sends heartbeats."""

    async def beat() -> None:
        while True:
            beat = heartbeat("tokenizer", member_id, "0a0a0a0a", PoolStatus(), state=state)
            await transport.publish(subjects.heartbeat("tokenizer", member_id), codec.encode(beat))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(beat())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [("ready", 0, "ready"), ("starting", 1, "its state is starting"), ("draining", 1, "draining")],
)
async def test_a_member_is_well_when_its_heartbeat_says_ready(
    check: Check, nats_connect: Any, nats_server: Any, subjects: Subjects, state: ServiceState, code: int, said: str
) -> None:
    transport = await nats_connect(nats_server, "tokenizer")
    async with beating(transport, subjects, f"tokenizer-{socket.gethostname()}-1", state):
        result, output = await check("tokenizer")
    assert result == code
    assert said in output


async def test_a_server_of_the_bus_that_is_gone_is_passed_over(
    nats_connect: Any, nats_server: Any, subjects: Subjects, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_NATS", f"nats://127.0.0.1:{unused_port}, {nats_server.url}")
    monkeypatch.setenv("ANTIPHON_NATS_CREDENTIALS", nats_server.credentials)
    monkeypatch.setenv("ANTIPHON_NAMESPACE", subjects.namespace)
    transport = await nats_connect(nats_server, "tokenizer")
    async with beating(transport, subjects, f"tokenizer-{socket.gethostname()}-1", "ready"):
        assert await asyncio.to_thread(healthcheck.member, "tokenizer", socket.gethostname()) == ""


async def test_another_hosts_heartbeat_does_not_count(
    check: Check, nats_connect: Any, nats_server: Any, subjects: Subjects
) -> None:
    transport = await nats_connect(nats_server, "tokenizer")
    async with beating(transport, subjects, "tokenizer-elsewhere-1", "draining"):
        check_task = asyncio.ensure_future(check("tokenizer"))
        done, _ = await asyncio.wait({check_task}, timeout=1.5)
        assert not done
        async with beating(transport, subjects, f"tokenizer-{socket.gethostname()}-1", "ready"):
            assert (await check_task)[0] == 0


async def test_silence_is_not_well(check: Check) -> None:
    result, output = await check("engine", timeout_s=1.0)
    assert result == 1
    assert "timed out" in output


@pytest.mark.parametrize(("status", "said"), [(200, ""), (503, "/readyz says 503: no engine")])
def test_the_gateway_is_well_when_it_says_that_it_is_ready(
    status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(b"no engine")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setattr(healthcheck, "PORT", server.server_port)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert healthcheck.gateway() == said
        thread.join()


async def test_a_gateway_that_serves_https_is_asked_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ROOT / "tests" / "system" / "tls"
    files: dict[str, Any] = {"ssl_keyfile": str(tls / "key.pem"), "ssl_certfile": str(tls / "certificate.pem")}
    app = create_app(ScriptedBackend(), GatewaySettings(**files))
    server = Server(server_config(app, GatewaySettings(**files)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(healthcheck, "PORT", listener.getsockname()[1])
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listener])
        assert await asyncio.to_thread(healthcheck.gateway) == ""
        await server.stop_accepting()


def test_a_gateway_that_does_not_listen_is_not_well(
    unused_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(healthcheck, "PORT", unused_port)
    monkeypatch.setattr(sys, "argv", ["healthcheck.py", "gateway"])
    assert healthcheck.main() == 1
    assert "refused" in capsys.readouterr().out
