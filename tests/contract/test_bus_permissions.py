"""What the users of the bus may do, on a real server with the configuration that the table gives."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from antiphon.launch.nats_server import OBSERVER, SETUP, Bus, find_binary, prepare
from antiphon.shared.bus.durable_log import LogConfig, Logged
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.transport import Delivery
from antiphon.shared.deployment.stores import adapters, models, quotas, stores
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.security.bus_permissions import Permissions, Role, password, permissions
from antiphon.shared.subjects import TOKENIZER_QUEUE, Subjects
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
    SETUP: "setup",
}
STREAMS = [config.name if isinstance(config, LogConfig) else f"KV_{config.name}" for config in stores(S, "memory")]
_DENIED_TO_ALL = (
    "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE", "STREAM.MSG.GET", "STREAM.SNAPSHOT", "STREAM.RESTORE",
    "STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE", "CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE",
)  # fmt: skip
"""Requests of JetStream about one stream that no user may make."""
SAMPLES = [
    S.tokenize("m"), S.tokenizer_direct("t1", "i"), S.engine_control("e1", "i"), S.engine_control("e2", "i"),
    S.engine_adapters("e1", "i"), S.adapters("m"), S.detokenizer_control("d1", "i"), S.detokenizer_tokens("d1", "i"),
    S.gateway_text("g1", "i"), S.gateway_tokens("g1", "i"), S.gateway_control("g1", "i"), S.gateway_text("g2", "i"),
    S.gateway_peers("g1", "i"), S.gateway_peers("g2", "i"),
    S.heartbeat("gateway", "g1"), S.heartbeat("engine", "e1"), S.heartbeat("engine", "e2"),
    S.vision("m"), S.vision_direct("v1", "i"), S.gateway_images("g1", "i"), S.models(), S.models_control(),
    S.heartbeat("vision", "v1"), "$KV.antiphon-v3-models.k",
    S.heartbeat("tokenizer", "t1"), S.heartbeat("detokenizer", "d1"), S.usage_record("r"), S.usage_open("r"),
    S.usage_sink("s"), S.repeatable("k"),
    S.stream_record("r"), S.stream_journal("g1", "i"), S.stream_journal("g2", "i"), S.steps("e1"), S.steps("e2"),
    *(f"{S.inbox(role, name)}.probe" for name, role in USERS.items()), f"{S.inbox('gateway', 'g1')}.x",
    "other.v3.hb.engine.e1",
    "$SYS.REQ.SERVER.PING",
    "$SRV.PING", "$SRV.PING.antiphon-engine.e1", "_INBOX.x", "$KV.antiphon-v3-limits.k", "$KV.antiphon-v3-adapters.k",
    "$JS.API.STREAM.CREATE.other", "$JS.API.STREAM.UPDATE.other", "$JS.API.STREAM.NAMES", "$JS.API.INFO",
    *(f"$JS.API.{verb}.{name}" for name in STREAMS for verb in (*_DENIED_TO_ALL, "DIRECT.GET", "STREAM.INFO")),
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

    async def connect(name: str, **options: Any) -> User:
        user = User(None)  # pyright: ignore[reportArgumentType]
        user.transport = await NatsTransport.connect(
            [bus.url],
            name=name,
            inbox_prefix=S.inbox(USERS[name], name),
            credentials=str(bus.directory / f"{name}.credentials"),
            **options,
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
        for whose in (S.inbox("gateway", "g2"), S.inbox("gateway", "*"), S.inbox("*", "*")):
            assert await user.refuses(f"{whose}.>", publish=False)


@pytest.mark.matrix("S-02")
async def test_an_engine_does_not_act_as_another_one(connect):
    observer, heard = await _hears(connect, OBSERVER, S.everything())
    engine = await connect("e1")
    forged = (S.heartbeat("engine", "e2"), S.steps("e2"), S.heartbeat("gateway", "g1"), S.engine_control("e2", "i"))
    for subject in forged:
        assert await engine.refuses(subject, publish=True)
    assert await engine.refuses(S.engine_control("e2", "*"), publish=False)
    await observer.transport.barrier()
    assert not [one for one in heard if not one.subject.startswith(S.inbox("observer", OBSERVER))]


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


@pytest.mark.matrix("S-01")
@pytest.mark.parametrize("name", [name for name in USERS if name not in ("g1", "g2")])
async def test_only_gateways_ask_gateways_for_records_and_end_their_streams(connect, name: str):
    gateway, heard = await _hears(connect, "g1", S.gateway_peers("g1", "i"))
    user = await connect(name)
    assert await user.refuses(S.gateway_peers("g1", "i"), publish=True)
    await gateway.transport.barrier()
    assert not heard
    other = await connect("g2")
    assert not await other.refuses(S.gateway_peers("g1", "i"), publish=True)
    await gateway.transport.barrier()
    assert len(heard) == 1


@pytest.mark.matrix("S-02")
async def test_whoever_is_asked_once_cannot_answer_what_others_are_asked(connect):
    tokenizer, engine, gateway = await connect("t1"), await connect("e1"), await connect("g1")
    asked: list[Delivery] = []
    await tokenizer.transport.subscribe(S.tokenize("m"), asked.append, queue=TOKENIZER_QUEUE)
    await engine.transport.subscribe(S.engine_control("e1", "i"), asked.append)
    await asyncio.gather(tokenizer.transport.barrier(), engine.transport.barrier())
    targets = (S.engine_control("e1", "i"), S.tokenize("m"), S.engine_control("e1", "i"))
    answers = [asyncio.create_task(gateway.transport.request(target, b"", timeout_s=60)) for target in targets]
    async with asyncio.timeout(60):
        while len(asked) < len(targets):
            await asyncio.sleep(0.01)
    tokens = [one.reply.rpartition(".")[2] for one in asked]
    assert all(len(token) == 32 for token in tokens), "128 bits"
    assert len({token[:8] for token in tokens}) == len({token[-8:] for token in tokens}) == len(tokens)
    for each in asked:
        who = tokenizer if each.subject == S.tokenize("m") else engine
        # A guess that is wrong is delivered to nobody, and the answer to the request is.
        await who.transport.publish(each.reply[:-1] + "x", b"guess")
        await who.transport.publish(each.reply, b"answer")
    assert [one.payload for one in await asyncio.gather(*answers)] == [b"answer"] * len(targets)


@pytest.mark.matrix("S-02")
@pytest.mark.parametrize("name", ["g1", "t1", "e1", "d1", "v1", "launcher"])
async def test_nobody_may_answer_a_message_to_itself_at_a_foreign_subject(connect, name: str):
    observer, heard = await _hears(connect, OBSERVER, S.heartbeats("engine"))
    user, other = await connect(name), await connect(name)
    own = f"{S.inbox(USERS[name], name)}.probe"
    arrived = asyncio.Event()
    for each in (user, other):
        await each.transport.subscribe(own, lambda _: arrived.set())
        await each.transport.barrier()
    await user.transport.publish(own, b"", reply=S.heartbeat("engine", "evil"))
    await asyncio.wait_for(arrived.wait(), 60)
    for each in (user, other):
        assert await each.refuses(S.heartbeat("engine", "evil"), publish=True)
    await observer.transport.barrier()
    assert not heard


@pytest.mark.matrix("S-02")
async def test_a_message_that_is_stored_and_read_reaches_nobody_else(connect):
    """The server sends what it reads from a stream to whatever subject the reader names."""
    await made(connect)
    engine, gateway, observer = await connect("e1"), await connect("g1"), await connect(OBSERVER, observes=True)
    kinds: list[str] = []
    gateway.transport.on_error = lambda kind, _: kinds.append(kind)
    heard: list[Delivery] = []
    texts, key = S.gateway_text("g1", "i"), "$KV.antiphon-v3-adapters.x"
    seen: list[bytes] = []
    await gateway.transport.subscribe(texts, heard.append)
    await observer.transport.subscribe(texts, lambda delivery: seen.append(delivery.payload))
    await asyncio.gather(gateway.transport.barrier(), observer.transport.barrier())
    get = f"$JS.API.DIRECT.GET.KV_antiphon-v3-adapters.{key}"
    # Headers that end early, so that whoever parses them does not come to those of the server.
    for number, headers in enumerate(({}, {"A": "b\r\n\r\nC: d"}), 1):
        await _store_raw(engine, key, headers, b"forged")
        async with asyncio.timeout(60):
            while kinds.count("stored_message") < number or seen.count(b"forged") < number:
                # The server may look before it has stored the message, and then answers with an empty one.
                await engine.transport.publish(get, b"", reply=texts)
                await engine.transport.barrier()
                await asyncio.sleep(0.05)
    assert not heard
    assert {*seen} <= {b"forged", b""}


async def _store_raw(user: User, subject: str, headers: dict[str, str], payload: bytes) -> None:
    """Publishes with headers that the library would refuse."""
    lines = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    data = lines.encode() + payload
    command = b"HPUB %b %d %d\r\n%b\r\n" % (subject.encode(), len(lines), len(data), data)
    await user.transport._client._send_command(command)  # pyright: ignore[reportPrivateUsage]
    await user.transport.barrier()


async def made(connect) -> None:
    """The setup user makes all stores."""
    setup = await connect(SETUP)
    for config in stores(S, "memory"):
        await setup.transport.make_store(config, replicas=1, timeout_s=60)
    assert not setup.refused


async def test_stores_work_for_those_who_have_them(connect):
    await made(connect)
    for name, bucket in (("g1", quotas(S)), ("g1", adapters(S)), ("e1", adapters(S)), ("launcher", models(S))):
        user = await connect(name)
        store = user.transport.key_value_store(bucket, timeout_s=60)
        assert await store.replace(f"{name}-key", b"value", 0) is not None
        found = await store.get(f"{name}-key")
        assert found is not None
        assert found.value == b"value"
        assert not user.refused
    gateway = await connect("g1")
    for config in stores(S, "memory"):
        if isinstance(config, LogConfig):
            log = gateway.transport.durable_log(config, timeout_s=60)
            subject = config.subject.replace("*.*", "g1.i").replace("*", "x")
            await log.open()
            number = await log.append(subject, b"value")
            assert number is not None
            assert await log.last(subject) == Logged(number, b"value")
            assert await log.following(subject, number) == Logged(number, b"value")
            assert await log.all_following(config.subject, number) == [Logged(number, b"value")]
    assert not gateway.refused


@pytest.mark.matrix("S-01")
@pytest.mark.parametrize("name", [name for name in USERS if name != SETUP])
async def test_only_setup_makes_and_changes_streams(connect, name: str):
    """Whoever may, reads with `subjects` what it may not subscribe to, and forges with `republish`."""
    await made(connect)
    user = await connect(name)
    for stream in STREAMS:
        for verb in ("STREAM.CREATE", "STREAM.UPDATE", *_DENIED_TO_ALL):
            assert await user.refuses(f"$JS.API.{verb}.{stream}", publish=True), (verb, stream)
    for config in ({"subjects": [S.gateway_text("*", "*")]}, {"republish": {"src": ">", "dest": S.models()}}):
        for verb in ("CREATE", "UPDATE"):
            for stream in (*STREAMS, f"own-{name}"):
                body = json.dumps({"name": stream, **config}).encode()
                subject = f"$JS.API.STREAM.{verb}.{stream}"
                user.refused.clear()
                await user.transport.publish(subject, body)
                await user.transport.barrier()
                assert any(f'"{subject.lower()}"' in text for text in user.refused)


async def test_setup_makes_streams_but_reads_and_writes_nothing(connect):
    await made(connect)
    setup = await connect(SETUP)
    granted = permissions("setup", S, SETUP)
    assert all(subject.startswith("$JS.API.STREAM.") for subject in granted.publish)
    assert granted.subscribe == (f"{S.inbox('setup', SETUP)}.>",)
    for stream in STREAMS:
        for verb in (*_DENIED_TO_ALL, "DIRECT.GET"):
            assert await setup.refuses(f"$JS.API.{verb}.{stream}", publish=True), (verb, stream)


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
                inbox_prefix=S.inbox(role, "any"),
                credentials=str(tmp_path / "drawn" / role / "credentials"),
                on_error=lambda _, error, refusals=refusals: refusals.append(str(error)),
            ),
            refusals,
        )
        assert not await user.refuses(allowed, publish=True), role
        assert await user.refuses(refused, publish=True), role
        for other in {"gateway", "tokenizer", "engine", "detokenizer"} - {role}:
            assert await user.refuses(f"{S.inbox(other, '*')}.>", publish=False), (role, other)
        await user.transport.close()
