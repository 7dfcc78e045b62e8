"""The bus over TLS: with the right authority, without it, with a client's certificate, and no way around it."""

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.launch.nats_server import find_binary
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.transport import Delivery, NoRespondersError
from antiphon.shared.codec import encode
from antiphon.shared.flags import SettingsError
from antiphon.shared.messages import ChangeModel
from antiphon.shared.receiving import ReceivesIntoOneBuffer
from antiphon.shared.security.tls import bus_context
from antiphon.shared.settings.bus import BusSettings
from antiphon.shared.subjects import Subjects
from antiphon.supervision.death_notice import BusAddress, announced_deaths
from antiphon.supervision.fleet import Fleet
from antiphon.versions.supervisor import run
from tests.conftest import NatsServer, free_port
from tests.contract.nats_protocol import protocol_of

pytestmark = pytest.mark.nats
FILES = Path(__file__).parents[1] / "system" / "tls"
CERTIFICATE, KEY = str(FILES / "certificate.pem"), str(FILES / "key.pem")
TRUSTING = BusSettings(nats_tls_ca=CERTIFICATE)


@pytest.fixture(params=[False, True], ids=["server only", "mutual"])
def mutual(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def server(tmp_path: Path, mutual: bool) -> Iterator[str]:
    """URL of a server that requires TLS."""
    port = free_port()
    verify = f', ca_file: "{CERTIFICATE}", verify: true' if mutual else ""
    config = tmp_path / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\nauthorization {{ user: "u", password: "secret" }}\n'
        f'tls {{ cert_file: "{CERTIFICATE}", key_file: "{KEY}"{verify} }}\n'
    )
    process = subprocess.Popen([find_binary(), "-c", str(config)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as probe:
            if probe.recv(4) == b"INFO":
                break
        time.sleep(0.02)
    yield f"nats://127.0.0.1:{port}"
    process.terminate()
    process.wait()


@pytest.fixture
def credentials(tmp_path: Path) -> str:
    file = tmp_path / "credentials"
    file.write_text("u:secret")
    file.chmod(0o600)
    return str(file)


async def _connect(url: str, settings: BusSettings, credentials: str) -> NatsTransport:
    context = bus_context(replace(settings, nats=url))
    return await NatsTransport.connect(
        [url], name="one", inbox_prefix="i", credentials=credentials, tls=context, wait_s=2
    )


async def test_messages_pass_with_the_right_certificates(server: str, credentials: str, mutual: bool):
    own = replace(TRUSTING, nats_tls_cert=CERTIFICATE, nats_tls_key=KEY) if mutual else TRUSTING
    transport = await _connect(server, own, credentials)
    heard: list[Delivery] = []
    await transport.subscribe("a", heard.append)
    payloads = [b"x", bytes(range(256)) * 2000, b"y"]
    for payload in payloads:
        await transport.publish("a", payload)
    await transport.barrier()
    assert isinstance(protocol_of(transport), ReceivesIntoOneBuffer)
    await transport.close()
    assert [one.payload for one in heard] == payloads


@pytest.mark.parametrize("mutual", [True], indirect=True)
async def test_the_launcher_takes_orders_about_versions_over_tls(server: str, credentials: str):
    context = bus_context(replace(TRUSTING, nats_tls_cert=CERTIFICATE, nats_tls_key=KEY))
    fleet, where = (
        Fleet(lambda *_: None),
        BusAddress(url=server, credentials=credentials, name="launcher-1", namespace="antiphon", tls=context),
    )

    async def serve() -> None:
        async with announced_deaths(fleet, where) as host:
            await run(host, fleet, lambda *_: None, directories={"tiny": ""}, keep_s=0.0, specs=lambda *_: [])

    launcher = asyncio.create_task(serve())
    client = await NatsTransport.connect([server], name="c", inbox_prefix="i", credentials=credentials, tls=context)
    try:
        subject, order = Subjects("antiphon").models_control(), encode(ChangeModel(action="rollback", model="tiny"))
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(NoRespondersError):
                answer = await client.request(subject, order, timeout_s=60)
                break
            assert time.monotonic() < deadline
            assert not launcher.done()
            await asyncio.sleep(0.05)
        assert b"has no former one" in answer.payload
    finally:
        launcher.cancel()
        await asyncio.gather(launcher, return_exceptions=True)
        await client.close()


async def test_an_unknown_authority_is_refused_at_once(server: str, credentials: str):
    with pytest.raises(SettingsError, match=r"no TLS with the NATS server.*certificate verify failed"):
        await _connect(server.replace("nats://", "tls://"), BusSettings(), credentials)


@pytest.mark.parametrize("mutual", [True], indirect=True)
async def test_a_client_without_its_certificate_is_refused(server: str, credentials: str):
    with pytest.raises(Exception, match=r"no TLS|No NATS server"):
        await _connect(server, TRUSTING, credentials)


async def test_nothing_is_said_to_a_server_without_tls(nats_server: NatsServer):
    """The password would go over the wire unencrypted."""
    with pytest.raises(SettingsError, match="does not require TLS"):
        await _connect(nats_server.url, TRUSTING, nats_server.credentials)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (BusSettings(nats_tls_ca="/nowhere"), "--nats-tls-ca: /nowhere"),
        (BusSettings(nats_tls_ca=KEY), "--nats-tls-ca"),
        (BusSettings(nats_tls_key=KEY), "needs --nats-tls-cert"),
        (BusSettings(nats_tls_cert=CERTIFICATE), "--nats-tls-cert and --nats-tls-key"),
        (BusSettings(nats_tls_cert=KEY, nats_tls_key=KEY), "--nats-tls-cert and --nats-tls-key"),
    ],
)
def test_files_that_cannot_be_used_are_named(settings: BusSettings, text: str):
    with pytest.raises(SettingsError, match=text):
        bus_context(settings)


def test_without_a_wish_for_tls_there_is_none():
    assert bus_context(BusSettings(nats="nats://h:1")) is None
    assert bus_context(BusSettings(nats="tls://h:1")) is not None
