"""The NATS transport where only a real server can show it: restarts, frozen servers, permissions, lagging receivers."""

import asyncio
import random
import signal
import socket

import pytest

from antiphon.shared import limits
from antiphon.shared.bus import nats as nats_module
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.nats_client import NatsClient
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.receiving import ReceivesIntoOneBuffer
from tests.contract.nats_protocol import protocol_of
from tests.contract.scripted_nats import ScriptedServer, answers, handshake_only, healthy

pytestmark = pytest.mark.nats


class Link:
    """Follows the connection through its callbacks."""

    def __init__(self, transport: NatsTransport) -> None:
        self.lost, self.back = asyncio.Event(), asyncio.Event()
        transport.on_disconnect, transport.on_reconnect = self.lost.set, self.back.set

    async def wait_lost(self, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            await self.lost.wait()

    async def wait_back(self, timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            await self.back.wait()


class Received(asyncio.Queue):
    def __call__(self, delivery) -> None:
        self.put_nowait(delivery.payload)

    async def next(self, timeout_s: float = 60.0) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await self.get()


@pytest.mark.matrix("B-01")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_after_a_restart_of_the_server_subscriptions_work_again(private_nats_server, nats_connect, number):
    one, two = await nats_connect(private_nats_server, "one"), await nats_connect(private_nats_server, "two")
    links, received = [Link(one), Link(two)], Received()
    await two.subscribe("a", received)
    await two.barrier()
    private_nats_server.kill(number)
    for link in links:
        await link.wait_lost()
    assert not one.connected
    private_nats_server.start()
    for link in links:
        await link.wait_back()
    assert one.connected
    assert isinstance(protocol_of(one), ReceivesIntoOneBuffer)
    await two.barrier()
    await one.publish("a", b"again")
    assert await received.next() == b"again"
    assert one.counters["disconnect"] == one.counters["reconnect"] == 1


async def test_what_is_published_while_the_server_is_away_is_sent_when_it_is_back(private_nats_server, nats_connect):
    one = await nats_connect(private_nats_server, "one")
    link, received = Link(one), Received()
    await one.subscribe("a", received)
    await one.barrier()
    private_nats_server.kill()
    await link.wait_lost()
    for number in range(10):
        await one.publish("a", str(number).encode())
    private_nats_server.start()
    assert [await received.next() for _ in range(10)] == [str(number).encode() for number in range(10)]


async def test_a_full_outbound_buffer_refuses_instead_of_growing(private_nats_server, nats_connect):
    one = await nats_connect(private_nats_server, "one")
    link = Link(one)
    private_nats_server.kill()
    await link.wait_lost()
    payload = bytes(500_000)
    for _ in range(limits.OUTBOUND_BYTES_MAX // len(payload)):
        await one.publish("a", payload)
    with pytest.raises(ServiceError) as failure:
        await one.publish("a", payload)
    assert failure.value.code == "bus_unavailable"


async def test_a_fast_publisher_is_slowed_down_and_not_refused(nats_server, nats_connect, namespace):
    one = await nats_connect(nats_server, "one")
    for _ in range(400):
        await one.publish(f"{namespace}.void", bytes(100_000))
    await one.barrier()
    assert one.connected


async def test_a_barrier_waits_for_the_server_to_come_back(private_nats_server, nats_connect):
    one = await nats_connect(private_nats_server, "one")
    link = Link(one)
    private_nats_server.kill()
    await link.wait_lost()
    barrier = asyncio.create_task(one.barrier())
    done, _ = await asyncio.wait({barrier}, timeout=0.2)
    assert not done
    private_nats_server.start()
    await asyncio.wait_for(barrier, 60)
    assert one.connected


async def test_a_barrier_that_was_under_way_survives_a_restart(private_nats_server, nats_connect):
    one = await nats_connect(private_nats_server, "one")
    link = Link(one)
    private_nats_server.freeze()
    barrier = asyncio.create_task(one.barrier())
    await asyncio.sleep(0)
    private_nats_server.kill()
    await link.wait_lost()
    private_nats_server.start()
    await asyncio.wait_for(barrier, 60)


async def test_a_barrier_gives_up_after_a_while(private_nats_server, nats_connect, monkeypatch):
    monkeypatch.setattr(nats_module, "BARRIER_TIMEOUT_S", 0.2)
    one = await nats_connect(private_nats_server, "one")
    private_nats_server.kill()
    with pytest.raises(ServiceError) as failure:
        await one.barrier()
    assert failure.value.code == "bus_unavailable"


async def test_an_abandoned_barrier_does_no_harm(private_nats_server, nats_connect):
    """A round trip that nobody waits for any more gets its answer late; the connection must stand that."""
    one = await nats_connect(private_nats_server, "one")
    received = Received()
    await one.subscribe("a", received)
    await one.barrier()
    private_nats_server.freeze()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one.barrier(), 0.05)
    private_nats_server.thaw()
    await one.barrier()
    await one.publish("a", b"alive")
    assert await received.next() == b"alive"
    assert one.counters["disconnect"] == 0


@pytest.mark.matrix("B-02")
async def test_a_frozen_server_shows_as_disconnected_and_comes_back(private_nats_server, nats_connect):
    one = await nats_connect(private_nats_server, "one")
    link = Link(one)
    private_nats_server.freeze()
    await link.wait_lost(20)
    assert not one.connected
    private_nats_server.thaw()
    await link.wait_back()
    await one.barrier()


@pytest.mark.matrix("B-02")
async def test_a_server_that_freezes_during_the_reconnection_does_not_end_it(monkeypatch, caplog):
    """The client's second connection gets an answer to the handshake and to nothing later, until it was given up."""
    monkeypatch.setattr(NatsClient.flush, "__defaults__", (0.2,))
    async with ScriptedServer(healthy, answers(1)) as server:
        one = await NatsTransport.connect([server.url], name="one", inbox_prefix="i")
        link = Link(one)
        server.writers[0].close()
        await link.wait_back()
        assert one.connected
        assert len(server.writers) == 3
        # Late answers on the former connection, and answers on the new one, find one reader.
        for _ in range(3):
            server.writers[1].write(b"PONG\r\n")
            await one.barrier()
        assert (one.counters["disconnect"], one.counters["reconnect"]) == (1, 1)
        assert "already waiting" not in caplog.text
        await one.close()


async def test_a_frozen_server_with_unread_data_does_not_hold_up_the_reconnection():
    async with ScriptedServer(handshake_only) as server:
        one = await NatsTransport.connect([server.url], name="one", inbox_prefix="i")
        link = Link(one)
        for _ in range(30):
            await one.publish("a", bytes(1_000_000))
            await asyncio.sleep(0)
        await link.wait_back()
        assert one.connected
        await one.close()


async def test_closing_does_not_hang_on_a_frozen_server(private_nats_server, nats_connect, monkeypatch):
    monkeypatch.setattr(nats_module, "CLOSE_TIMEOUT_S", 0.5)
    one = await nats_connect(private_nats_server, "one")
    await one.subscribe("a", lambda delivery: None)
    private_nats_server.freeze()
    await asyncio.wait_for(one.close(), 60)
    assert not one.connected


async def test_a_connection_that_the_server_ends_for_good_is_reported(private_nats_server, nats_connect):
    one = await nats_connect(private_nats_server, "one")
    private_nats_server.password = "changed"
    private_nats_server.write_config()
    private_nats_server.process.send_signal(signal.SIGHUP)
    await asyncio.wait_for(one.lost(), 60)
    assert not one.connected
    with pytest.raises(ServiceError):
        await one.barrier()


async def test_no_server_is_reported_with_its_url_and_without_its_password(unused_port):
    url = f"nats://me:secret@127.0.0.1:{unused_port}"
    with pytest.raises(ServiceError) as failure:
        await NatsTransport.connect([url], name="one", inbox_prefix="i", wait_s=0.3)
    assert failure.value.code == "bus_unavailable"
    assert f"nats://127.0.0.1:{unused_port}" in str(failure.value)
    assert "secret" not in str(failure.value)


async def test_connecting_waits_for_a_server_that_comes_up(private_nats_server, nats_connect):
    private_nats_server.kill()
    connecting = asyncio.create_task(nats_connect(private_nats_server, "one"))
    done, _ = await asyncio.wait({connecting}, timeout=0.2)
    assert not done
    await asyncio.to_thread(private_nats_server.start)
    assert (await asyncio.wait_for(connecting, 60)).connected


async def test_connecting_can_be_cancelled(private_nats_server, nats_connect):
    private_nats_server.freeze()
    connecting = asyncio.create_task(nats_connect(private_nats_server, "one"))
    await asyncio.wait({connecting}, timeout=0.1)
    connecting.cancel()
    await asyncio.wait({connecting}, timeout=60)
    assert connecting.cancelled()


async def test_one_of_several_servers_is_enough(nats_server, unused_port):
    urls = [f"nats://127.0.0.1:{unused_port}", nats_server.url]
    for number in range(4):
        transport = await NatsTransport.connect(
            urls, name=f"c{number}", inbox_prefix=f"c{number}", credentials=nats_server.credentials
        )
        assert transport.connected
        await transport.close()


async def test_wrong_credentials_are_a_setting_to_correct(nats_server, tmp_path):
    file = tmp_path / "credentials"
    file.write_text("antiphon:wrong")
    with pytest.raises(SettingsError, match="refuses"):
        await NatsTransport.connect([nats_server.url], name="one", inbox_prefix="i", credentials=str(file))


@pytest.mark.parametrize("content", ["", "only-a-user", ":password", "user:", "a:b\nc:d"])
async def test_a_malformed_credentials_file_is_a_setting_to_correct(nats_server, tmp_path, content):
    file = tmp_path / "credentials"
    file.write_text(content)
    with pytest.raises(SettingsError, match="user:password"):
        await NatsTransport.connect([nats_server.url], name="one", inbox_prefix="i", credentials=str(file))


async def test_a_missing_credentials_file_and_a_malformed_url_are_settings_to_correct(nats_server, tmp_path):
    with pytest.raises(SettingsError, match="cannot be read"):
        await NatsTransport.connect([nats_server.url], name="o", inbox_prefix="i", credentials=str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="nats"):
        await NatsTransport.connect(["nats://:x:"], name="one", inbox_prefix="i", wait_s=0.1)


async def test_a_burst_arrives_whole_and_in_order_whatever_way_its_messages_take(nats_server, nats_connect, namespace):
    one, two = await nats_connect(nats_server, "one"), await nats_connect(nats_server, "two")
    received: list[tuple[str, bytes, str, str]] = []
    await two.subscribe(
        f"{namespace}.*",
        lambda got: received.append((got.subject, got.payload, got.reply, (got.headers or {}).get("number", ""))),
    )
    await two.barrier()
    chance, sent = random.Random(5), []
    for number in range(5000):
        size = chance.choice((0, 0, 1, 200, 3000)) if number % 500 else 600_000  # more than one receive can hold
        subject, payload = f"{namespace}.s{number % 7}", f"{number} ".encode() + chance.randbytes(size)
        reply = f"{namespace}r.{number}" if number % 3 == 0 else ""
        headers = {"number": str(number)} if number % 11 == 0 else None
        await one.publish(subject, payload, reply=reply, headers=headers)
        sent.append((subject, payload, reply, str(number) if headers else ""))
        if number % 1000 == 0:
            await one.barrier()
            await two.barrier()  # PING and PONG between the messages
    await one.barrier()
    await two.barrier()
    assert received == sent


async def test_a_receiver_that_fails_is_reported_and_the_next_messages_arrive(nats_server, nats_connect, namespace):
    one, two = await nats_connect(nats_server, "one"), await nats_connect(nats_server, "two")
    reported: list[str] = []
    two.on_error = lambda kind, error: reported.append(kind)
    received: list[bytes] = []

    def receive(delivery) -> None:
        received.append(delivery.payload)
        if delivery.payload == b"bad":
            raise ValueError("bad")

    await two.subscribe(f"{namespace}.a", receive)
    await two.barrier()
    for headers in (None, {"a": "b"}):
        for payload in (b"bad", b"good"):
            await one.publish(f"{namespace}.a", payload, headers=headers)
    await one.barrier()
    await two.barrier()
    assert received == [b"bad", b"good"] * 2
    assert reported == ["receiver_failed"] * 2
    assert two.counters["receiver_failed"] == 2


async def test_what_a_server_does_not_take_waits_and_arrives_in_order(nats_server, nats_connect, namespace):
    one, two = await nats_connect(nats_server, "one"), await nats_connect(nats_server, "two")
    received = Received()
    await two.subscribe(f"{namespace}.a", received)
    await two.barrier()
    sent = [bytes([number]) * 1_000_000 for number in range(25)]
    for payload in sent:
        await one.publish(f"{namespace}.a", payload)  # together more than a socket holds
    await one.barrier()
    assert [await received.next() for _ in sent] == sent


@pytest.mark.parametrize("subject", ["a b", "", "a\r\nPUB b 0", "\t"])
async def test_a_malformed_subject_is_refused(nats_server, nats_connect, subject: str):
    one = await nats_connect(nats_server, "one")
    with pytest.raises(ServiceError, match="malformed"):
        await one.publish(subject, b"x")
    with pytest.raises(ServiceError, match="malformed"):
        await one.publish("a", b"x", reply=f"{subject} ")


async def test_a_forbidden_subject_is_counted_and_reported(private_nats_server, nats_connect):
    private_nats_server.kill()
    private_nats_server.permissions = ', permissions: { publish: "allowed.>", subscribe: "allowed.>" }'
    private_nats_server.start()
    one = await nats_connect(private_nats_server, "one")
    reported: list[str] = []
    one.on_error = lambda kind, error: reported.append(f"{kind}: {error}")
    await one.publish("forbidden.a", b"")
    await one.subscribe("forbidden.b", lambda delivery: None)
    await one.barrier()
    assert one.counters["permission_denied"] == 2
    assert ["publish" in reported[0], "subscription" in reported[1]] == [True, True]
    assert one.connected


async def test_headers_that_make_a_message_too_large_are_refused(private_nats_server, nats_connect, namespace):
    private_nats_server.kill()
    private_nats_server.max_payload = 2**20
    private_nats_server.start()
    one = await nats_connect(private_nats_server, "one")
    with pytest.raises(ServiceError) as failure:
        await one.publish(f"{namespace}.a", bytes(2**20 - 1000), headers={"tracestate": "x" * 50_000})
    assert failure.value.code == "request_too_large"
    assert "max_payload is 1048576" in failure.value.message
    await one.barrier()
    assert one.connected


async def test_a_malformed_header_is_refused(nats_server, nats_connect, namespace):
    one = await nats_connect(nats_server, "one")
    with pytest.raises(ServiceError) as failure:
        await one.publish(f"{namespace}.a", b"", headers={"bad key": "x"})
    assert failure.value.code == "internal_error"


async def test_a_subject_as_long_as_a_protocol_line_is_refused(nats_server, nats_connect):
    one = await nats_connect(nats_server, "one")
    for attempt in (one.publish("x" * 5000, b""), one.request("x" * 5000, b"", timeout_s=1)):
        with pytest.raises(ServiceError) as failure:
            await attempt
        assert failure.value.code == "internal_error"
    await one.barrier()
    assert one.connected


async def test_the_replies_of_one_connection_go_to_its_own_inbox(nats_server, nats_connect, subjects):
    one, two = await nats_connect(nats_server, "one"), await nats_connect(nats_server, "two")
    seen = Received()

    async def answer(delivery) -> None:
        seen.put_nowait(delivery.reply)
        await two.publish(delivery.reply, b"")

    tasks: set[asyncio.Task] = set()
    await two.subscribe(subjects.tokenize("m"), lambda delivery: tasks.add(asyncio.create_task(answer(delivery))))
    await two.barrier()
    await one.request(subjects.tokenize("m"), b"", timeout_s=60)
    assert (await seen.next()).startswith(subjects.inbox("tester", "one") + ".")


async def test_a_request_that_is_cancelled_as_its_reply_comes_ends(nats_server, nats_connect, namespace):
    """In a task that works in a loop, which would otherwise never end."""
    transport = await nats_connect(nats_server, "one")

    async def answer(message) -> None:
        await transport.publish(message.reply, b"reply")

    await transport.subscribe(namespace, lambda message: answering.append(asyncio.create_task(answer(message))))
    answering: list[asyncio.Task[None]] = []

    async def ask() -> None:
        while True:
            await transport.request(namespace, b"", timeout_s=30.0)

    request = asyncio.create_task(ask())
    while not (waiting := transport._client._resp_map):
        await asyncio.sleep(0)
    next(iter(waiting.values())).add_done_callback(lambda _: request.cancel())
    with pytest.raises(asyncio.CancelledError):
        await request
    assert answering


async def test_a_server_that_does_not_answer_is_named_while_the_client_still_tries(monkeypatch, caplog):
    monkeypatch.setattr(nats_module, "TELL_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"nats://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ServiceError) as failure:
        await NatsTransport.connect([url], name="one", inbox_prefix="_INBOX.one", wait_s=0.2)
    assert failure.value.message.startswith(f"No NATS server answers at {url}")
    assert [record.message for record in caplog.records if f"no NATS server answers at {url} yet" in record.message]
