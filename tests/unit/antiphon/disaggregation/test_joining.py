"""How the scheduler gathers its instances: messages over real sockets, and what each side makes of them."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from antiphon.async_client import get, post
from antiphon.disaggregation import scheduler
from antiphon.disaggregation.instance import Deployment, read_deployment
from antiphon.disaggregation.instance_server import Answer, Request, Response, json_response, serve
from antiphon.disaggregation.join import HEADER, Join, Joined, bus_secret, is_signed, sign
from antiphon.disaggregation.scheduler import Gathering
from antiphon.disaggregation.table_tool import generate
from antiphon.disaggregation.worker import Worker
from antiphon.settings import InstanceSettings
from antiphon.shared.security.bus_permissions import password
from antiphon.supervision.fleet import Failure

IP, KEY = "127.0.0.1", b"0123456789abcdef"


def deployment_of(folder: Path, name: str) -> Deployment:
    generate(["4"], ["6"], folder, ip=IP, api_server=True)
    return read_deployment(
        str(folder / f"global_ranktable_{IP}.json"), str(folder / f"local_ranktable_{IP}_{name}.json")
    )


def worker_of(folder: Path, name: str = "4", **settings: Any) -> Worker:
    return Worker(deployment_of(folder, name), InstanceSettings(**settings), {}, KEY, folder)


def join(worker: Worker, folder: Path, key: bytes = KEY, **changes: object) -> tuple[int, Joined | None]:
    """The answer to a scheduler's message, and its content if it is one of an instance."""
    message = Join(2, "prefill-1", deployment_of(folder, "4").digest, "nats://h:1")
    body = msgspec.json.encode(msgspec.structs.replace(message, **changes))
    answer = worker.answer(Request("POST", "/join", {HEADER: sign(key, "join", body)}, body))
    if HEADER not in answer.headers:
        return answer.status, None
    assert is_signed(KEY, "joined", answer.body, answer.headers[HEADER])
    return answer.status, msgspec.json.decode(answer.body, type=Joined)


async def test_an_instance_follows_the_latest_scheduler_that_has_its_key_and_means_it(tmp_path: Path) -> None:
    worker = worker_of(tmp_path)
    digest = deployment_of(tmp_path, "4").digest
    assert join(worker, tmp_path, key=b"another key of the same length") == (403, None)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "decode-1"}, "it is prefill-1"),
        ({"table": "x"}, "its global rank table is another one (GLOBAL_RANK_TABLE_FILE_PATH)"),
        ({"bus": ""}, "either all instances and the scheduler have --nats, or none"),
    ]
    for changes, refused in cases:
        assert join(worker, tmp_path, **changes) == (
            409,
            Joined(epoch=2, name="prefill-1", table=digest, devices="4", refused=refused),
        )
    assert not (tmp_path / "prefill-1.credentials").exists()
    for _ in range(2):  # the scheduler repeats itself
        assert join(worker, tmp_path) == (200, Joined(epoch=2, name="prefill-1", table=digest, devices="4"))
    credentials = tmp_path / "prefill-1.credentials"
    assert credentials.read_text() == f"prefill-1:{password(bus_secret(KEY, 2), 'prefill-1')}"
    assert credentials.stat().st_mode & 0o077 == 0
    assert join(worker, tmp_path, epoch=1)[1] == Joined(
        epoch=1, name="prefill-1", table=digest, devices="4", refused="it follows a scheduler that was started later"
    )
    assert join(worker, tmp_path, epoch=3)[0] == 200
    assert credentials.read_text() == f"prefill-1:{password(bus_secret(KEY, 3), 'prefill-1')}"


async def test_an_instance_with_a_bus_of_its_own_only_says_who_it_is(tmp_path: Path) -> None:
    worker = worker_of(tmp_path, nats="nats://h:1")
    assert join(worker, tmp_path)[0] == 409
    assert join(worker, tmp_path, bus="")[0] == 200
    assert not (tmp_path / "prefill-1.credentials").exists()


async def test_a_message_of_another_version_is_refused(tmp_path: Path) -> None:
    worker, body = worker_of(tmp_path), b'{"epoch": 1}'
    answer = worker.answer(Request("POST", "/join", {HEADER: sign(KEY, "join", body)}, body))
    assert answer.status == 400
    assert b"not a message of a scheduler of this version" in answer.body


@pytest.fixture
async def listening() -> AsyncIterator[Callable[[Answer], Awaitable[int]]]:
    """Starts servers with given answers; gives their ports."""
    servers: list[asyncio.Server] = []

    async def start(answer: Answer) -> int:
        listener = socket.create_server((IP, 0))
        servers.append(await serve(listener, answer))
        return listener.getsockname()[1]

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


async def test_the_server_answers_whole_requests_and_survives_others(listening) -> None:
    seen: list[Request] = []

    def answer(request: Request) -> Response:
        seen.append(request)
        return json_response(200, path=request.path)

    port = await listening(answer)
    assert json.loads((await get(IP, port, "/health?x=1")).body) == {"path": "/health"}
    assert (await post(IP, port, "/join", b"body", {"X-A": "b"})).status == 200
    assert (seen[1].method, seen[1].body, seen[1].headers["x-a"]) == ("POST", b"body", "b")
    for raw in (
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection(IP, port)
        writer.write(raw)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
    for raw in (b"GET / HTTP/1.1\r\n" + b"x" * 40_000, b"GET"):
        reader, writer = await asyncio.open_connection(IP, port)
        writer.write(raw)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    assert (await get(IP, port, "/health")).status == 200
    assert len(seen) == 3


def gathering_of(folder: Path, ports: list[int], said: list[str]) -> Gathering:
    return Gathering(
        deployment=deployment_of(folder, "host"),
        ports=ports,
        key=KEY,
        epoch=2,
        bus="nats://h:1",
        sink=lambda _name, line: said.append(line),
    )


async def failure_of(gathering: Gathering) -> str:
    async with asyncio.timeout(60):
        failure = await gathering.run()
    assert isinstance(failure, Failure)
    assert failure.exit_code == 78
    return failure.message


@pytest.mark.spec("S-DIS-043")
async def test_the_scheduler_names_the_position_at_which_another_instance_answers(tmp_path: Path, listening) -> None:
    prefill, decode = worker_of(tmp_path, "4"), worker_of(tmp_path, "6")
    ports = [await listening(each.answer) for each in (decode, decode)]
    message = await failure_of(gathering_of(tmp_path, ports, []))
    assert message.startswith(f"NODE_PORTS position 1, prefill-1 at {IP}:{ports[0]}: there is decode-1 (devices 6).")
    ports = [await listening(each.answer) for each in (prefill, prefill)]
    assert f"NODE_PORTS position 2, decode-1 at {IP}:{ports[1]}: there is prefill-1" in await failure_of(
        gathering_of(tmp_path, ports, [])
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (json_response(200), "answers, but is no instance of a deployment (start-role)"),
        (json_response(404), "answers, but is no instance of a deployment"),
        (json_response(403), "has another key"),
        (Response(200, b"{}", {HEADER: "00"}), "has another key"),
    ],
)
async def test_what_is_no_instance_with_the_key_ends_the_scheduler(
    answer: Response, said: str, tmp_path: Path, listening
) -> None:
    port = await listening(lambda _request: answer)
    assert said in await failure_of(gathering_of(tmp_path, [port, port], []))


async def test_it_waits_for_silent_instances_and_says_so_once(
    tmp_path: Path, listening, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "POLL_S", 0.01)
    monkeypatch.setattr(scheduler, "REMINDER_S", 0.05)
    said: list[str] = []
    port = await listening(worker_of(tmp_path, "6").answer)
    gathering = asyncio.create_task(gathering_of(tmp_path, [unused_port, port], said).run())
    async with asyncio.timeout(60):
        while len(said) < 2:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    assert sorted(said) == [
        f"NODE_PORTS position 1, prefill-1 at {IP}:{unused_port}: does not answer; start this instance, or check host, "
        "port and firewall",
        f"decode-1 has joined ({IP}:{port})",
    ]
    gathering.cancel()
    await asyncio.gather(gathering, return_exceptions=True)
