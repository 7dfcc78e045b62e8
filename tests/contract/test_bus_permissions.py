"""What the users of the bus may do, on a real server with the configuration that the table gives."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from antiphon.launch.nats_server import OBSERVER, Bus, find_binary, prepare
from shared.bus.nats import NatsTransport
from shared.bus.transport import Delivery
from shared.config import SettingsError
from shared.errors import ServiceError
from shared.security.bus_permissions import Permissions, Role, password, permissions
from shared.subjects import TOKENIZER_QUEUE, Subjects
from tests.conftest import free_port

pytestmark = pytest.mark.nats
NATS = Path(__file__).resolve().parents[2] / "infra/nats"
S = Subjects()
USERS: dict[str, Role] = {
    "g1": "gateway",
    "g2": "gateway",
    "t1": "tokenizer",
    "e1": "engine",
    "e2": "engine",
    "d1": "detokenizer",
    "v1": "vision",
    "launcher": "launcher",
    OBSERVER: "observer",
}
SAMPLES = [
    S.tokenize("m"), S.tokenizer_direct("t1", "i"), S.engine_control("e1", "i"), S.engine_control("e2", "i"),
    S.engine_adapters("e1", "i"), S.adapters("m"), S.detokenizer_control("d1", "i"), S.detokenizer_tokens("d1", "i"),
    S.gateway_text("g1", "i"), S.gateway_tokens("g1", "i"), S.gateway_control("g1", "i"), S.gateway_text("g2", "i"),
    S.heartbeat("gateway", "g1"), S.heartbeat("engine", "e1"), S.heartbeat("engine", "e2"),
    S.vision("m"), S.vision_direct("v1", "i"), S.gateway_pictures("g1", "i"), S.models(), S.models_control(),
    S.heartbeat("vision", "v1"), "$KV.antiphon-v2-models.k",
    S.heartbeat("tokenizer", "t1"), S.heartbeat("detokenizer", "d1"), S.usage(),
    S.stream_record("r"), S.stream_journal("g1", "i"), S.stream_journal("g2", "i"), S.steps("e1"), S.steps("e2"),
    *(f"{S.inbox(name)}.probe" for name in USERS), f"{S.inbox('g1')}.x", "other.v2.hb.engine.e1",
    "$SYS.REQ.SERVER.PING",
    "$SRV.PING", "$SRV.PING.antiphon-engine.e1", "_INBOX.x", "$KV.antiphon-v2-limits.k", "$KV.antiphon-v2-adapters.k",
    "$JS.API.STREAM.DELETE.KV_antiphon-v2-limits", "$JS.API.STREAM.CREATE.other", "$JS.API.CONSUMER.CREATE.x.y",
    "$JS.API.STREAM.DELETE.antiphon-v2-streams", "$JS.API.DIRECT.GET.antiphon-v2-streams",
    "$JS.API.STREAM.PURGE.KV_antiphon-v2-adapters", "$JS.API.STREAM.CREATE.KV_antiphon-v2-limits",
]  # fmt: skip


@dataclass
class User:
    """A connection of one user, and what the server has refused it."""

    transport: NatsTransport
    refused: list[str] = field(default_factory=list[str])

    async def refuses(self, subject: str, *, publish: bool, queue: str = "") -> bool:
        self.refused.clear()
        try:
            if publish:
                await self.transport.publish(subject, b"x")
            else:
                await self.transport.subscribe(subject, lambda _: None, queue=queue)
        except ServiceError:
            return True
        await self.transport.barrier()
        # The client writes the server's errors in lower case.
        return any(f'"{subject.lower()}"' in text for text in self.refused)


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bus]:
    prepared = prepare(tmp_path_factory.mktemp("bus"))
    for name, role in USERS.items():
        prepared.join(role, name)
    prepared.write()
    with (prepared.directory / "log").open("wb") as log:
        process = subprocess.Popen([find_binary(), "-c", str(prepared.config)], stderr=log)
    yield prepared
    process.terminate()
    process.wait()


@pytest.fixture
async def connect(bus: Bus) -> AsyncIterator[object]:
    made: list[NatsTransport] = []

    async def connect(name: str) -> User:
        user = User(None)  # pyright: ignore[reportArgumentType]
        user.transport = await NatsTransport.connect(
            [bus.url],
            name=name,
            inbox_prefix=S.inbox(name),
            credentials=str(bus.directory / f"{name}.credentials"),
            on_error=lambda kind, error: user.refused.append(str(error)) if kind == "permission_denied" else None,
        )
        made.append(user.transport)
        return user

    yield connect
    await asyncio.gather(*(transport.close() for transport in made))


def _matches(pattern: str, subject: str) -> bool:
    wanted, got = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(got) > index
        if index >= len(got) or token not in ("*", got[index]):
            return False
    return len(wanted) == len(got)


def _allows(patterns: tuple[str, ...], subject: str, queue: str = "") -> bool:
    for pattern in patterns:
        name, _, group = pattern.partition(" ")
        if _matches(name, subject) and group in ("", queue):
            return True
    return False


@pytest.mark.parametrize("name", USERS)
async def test_the_server_allows_exactly_what_the_table_says(connect, name: str):
    user, granted = await connect(name), permissions(USERS[name], S, name)
    wrong: list[str] = []
    for subject in SAMPLES:
        if await user.refuses(subject, publish=True) == _allows(granted.publish, subject):
            wrong.append(f"publish {subject}")
        if await user.refuses(subject, publish=False) == _allows(granted.subscribe, subject):
            wrong.append(f"subscribe {subject}")
    assert not wrong


async def _hears(connect, listener: str, pattern: str) -> tuple[User, list[Delivery]]:
    heard: list[Delivery] = []
    user = await connect(listener)
    await user.transport.subscribe(pattern, heard.append)
    await user.transport.barrier()
    return user, heard


@pytest.mark.matrix("S-01")
@pytest.mark.parametrize(
    "subject", [S.gateway_tokens("g2", "i"), S.gateway_text("g2", "i"), S.heartbeat("engine", "e1"), S.steps("e1")]
)
async def test_a_gateway_forges_no_tokens_texts_or_heartbeats(connect, bus: Bus, subject: str):
    observer, heard = await _hears(connect, OBSERVER, subject)
    gateway = await connect("g1")
    assert await gateway.refuses(subject, publish=True)
    await observer.transport.barrier()
    assert not heard
    assert gateway.transport.counters["permission_denied"] == 1
    assert subject in (bus.directory / "log").read_text()


@pytest.mark.matrix("S-01")
@pytest.mark.parametrize("pattern", [">", S.everything(), S.engine_control("*", "*"), S.gateway_text("g2", "*")])
async def test_a_gateway_reads_nothing_that_is_not_for_it(connect, pattern: str):
    gateway = await connect("g1")
    assert await gateway.refuses(pattern, publish=False)


@pytest.mark.matrix("S-01")
async def test_the_inbox_of_another_process_is_closed(connect):
    for name in ("g1", "e1", "t1", "d1"):
        user = await connect(name)
        assert await user.refuses(f"{S.inbox('g2')}.>", publish=False)
        assert await user.refuses(f"{S.inbox('*')}.>", publish=False)
        assert await user.refuses(f"{S.inbox('g2')}.forged", publish=True)


@pytest.mark.matrix("S-02")
async def test_an_engine_does_not_act_as_another_one(connect):
    observer, heard = await _hears(connect, OBSERVER, S.everything())
    engine = await connect("e1")
    forged = (S.heartbeat("engine", "e2"), S.steps("e2"), S.heartbeat("gateway", "g1"), S.engine_control("e2", "i"))
    for subject in forged:
        assert await engine.refuses(subject, publish=True)
    assert await engine.refuses(S.engine_control("e2", "*"), publish=False)
    await observer.transport.barrier()
    assert not [one for one in heard if not one.subject.startswith(S.inbox(OBSERVER))]


@pytest.mark.matrix("S-02")
@pytest.mark.parametrize(
    "credentials",
    ["", "e1:wrong", "e9:wrong", "e2:{e1}", "antiphon:{e1}"],
    ids=["anonymous", "wrong", "unknown", "other", "old"],
)
async def test_whoever_is_not_known_is_refused(bus: Bus, tmp_path: Path, credentials: str):
    path = ""
    if credentials:
        file = tmp_path / "credentials"
        file.write_text(credentials.format(e1=password(bus.secret, "e1")))
        file.chmod(0o600)
        path = str(file)
    with pytest.raises(SettingsError, match="refuses them"):
        await NatsTransport.connect([bus.url], name="x", inbox_prefix="x", credentials=path, wait_s=2)


async def test_requests_are_answered_once_and_unasked_replies_are_refused(connect):
    tokenizer, gateway = await connect("t1"), await connect("g1")
    asked: list[Delivery] = []

    def receive(delivery: Delivery) -> None:
        asked.append(delivery)
        answers.append(asyncio.ensure_future(tokenizer.transport.publish(delivery.reply, b"tokens")))

    answers: list[asyncio.Future[None]] = []
    await tokenizer.transport.subscribe(S.tokenize("m"), receive, queue=TOKENIZER_QUEUE)
    await tokenizer.transport.barrier()
    reply = await gateway.transport.request(S.tokenize("m"), b"text", timeout_s=60)
    assert reply.payload == b"tokens"
    await asyncio.gather(*answers)
    assert await tokenizer.refuses(asked[0].reply, publish=True), "a second answer is not allowed"
    assert await tokenizer.refuses(f"{S.inbox('g1')}.guess", publish=True)


async def test_stores_work_for_those_who_have_them(connect):
    for name, bucket in (("g1", "limits"), ("g1", "adapters"), ("e1", "adapters")):
        user = await connect(name)
        store = user.transport.key_value_store(f"antiphon-v2-{bucket}", ttl_s=60, timeout_s=2)
        assert await store.replace(f"{name}-key", b"value", 0) is not None
        found = await store.get(f"{name}-key")
        assert found is not None
        assert found.value == b"value"
        assert not user.refused


async def test_the_observer_writes_nothing(connect):
    observer = await connect(OBSERVER)
    granted: Permissions = permissions("observer", S)
    assert granted.publish == ("$SRV.>",)
    for subject in SAMPLES:
        if not subject.startswith("$SRV."):
            assert await observer.refuses(subject, publish=True), subject


@pytest.fixture
def container_bus(tmp_path: Path) -> Iterator[str]:
    """URL of a server with the files of infra/nats, on a port of this machine."""
    argv = ["sh", str(NATS / "make_credentials.sh"), str(tmp_path / "drawn")]
    subprocess.run(argv, env={**os.environ, "OWNER": ""}, check=True)
    (tmp_path / "secrets").symlink_to(tmp_path / "drawn/server")
    ports = {"0.0.0.0:4222": f"127.0.0.1:{free_port()}", "127.0.0.1:8222": f"127.0.0.1:{free_port()}"}
    config = (NATS / "nats.conf").read_text().replace("/tmp/jetstream", f"{tmp_path}/jetstream")
    for old, new in ports.items():
        config = config.replace(old, new)
    (tmp_path / "nats.conf").write_text(config)
    (tmp_path / "users.conf").write_text((NATS / "users.conf").read_text())
    process = subprocess.Popen([find_binary(), "-c", str(tmp_path / "nats.conf")], stderr=subprocess.DEVNULL)
    yield f"nats://{ports['0.0.0.0:4222']}"
    process.terminate()
    process.wait()


async def test_containers_let_each_service_in_with_its_own_rights(container_bus: str, tmp_path: Path):
    for role, allowed, refused in (
        ("gateway", S.heartbeat("gateway", "any"), S.heartbeat("engine", "any")),
        ("tokenizer", S.heartbeat("tokenizer", "any"), S.gateway_text("g1", "i")),
        ("engine", S.detokenizer_tokens("d1", "i"), S.engine_control("e1", "i")),
        ("detokenizer", S.gateway_text("g1", "i"), S.detokenizer_tokens("d1", "i")),
    ):
        refusals: list[str] = []
        user = User(
            await NatsTransport.connect(
                [container_bus],
                name=role,
                inbox_prefix=S.inbox("any"),
                credentials=str(tmp_path / "drawn" / role / "credentials"),
                on_error=lambda _, error, refusals=refusals: refusals.append(str(error)),
            ),
            refusals,
        )
        assert not await user.refuses(allowed, publish=True), role
        assert await user.refuses(refused, publish=True), role
        await user.transport.close()
