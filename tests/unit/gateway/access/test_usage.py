"""Usage records on their way: in order, each once, kept while a receiver is down, dropped only when that lasts."""

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from antiphon.services.gateway.edge.access import usage
from antiphon.services.gateway.edge.access.usage import DeliveryError, Receiver, UsageLedger
from antiphon.services.gateway.edge.access.usage_sinks import BusSink, FileSink, WebhookSink, sink_of
from antiphon.shared import limits
from antiphon.shared.codec import Decoder
from antiphon.shared.config import GatewaySettings
from antiphon.shared.flags import SettingsError, validated
from antiphon.shared.messages import UsageRecord
from antiphon.shared.subjects import Subjects
from tests.support.memory import MemoryBus
from tests.support.simulation import run_simulation


def record(number: int) -> UsageRecord:
    return UsageRecord(
        request_id=f"r{number}",
        gateway_id="g",
        key="team",
        model="m",
        outcome="completed",
        prompt_tokens=number,
        finish_reasons=("stop",),
    )


class Flaky:
    """Takes records unless it is down."""

    def __init__(self) -> None:
        self.down = False
        self.attempts = 0
        self.taken: list[str] = []

    async def deliver(self, records) -> None:
        self.attempts += 1
        await asyncio.sleep(0.01)
        if self.down:
            raise DeliveryError("down")
        self.taken += [each.request_id for each in records]


def test_records_arrive_in_order_although_the_receiver_was_down_for_a_while(caplog):
    async def main() -> None:
        flaky = Flaky()
        receiver = Receiver("test", flaky.deliver)
        flaky.down = True
        for number in range(1200):
            receiver.put(record(number))
        await asyncio.sleep(100)
        assert 5 <= flaky.attempts <= 10, "it is tried again, ever less often"
        assert caplog.text.count("takes no usage records") == 1
        flaky.down = False
        await asyncio.sleep(usage.RETRY_S[1])
        assert flaky.taken == [f"r{number}" for number in range(1200)]
        assert (receiver.num_delivered, receiver.num_dropped) == (1200, 0)

    run_simulation(main)


def test_only_a_full_queue_drops_records_and_counts_them(monkeypatch):
    monkeypatch.setattr(limits, "USAGE_QUEUE_MAX", 10)

    async def main() -> None:
        flaky = Flaky()
        flaky.down = True
        receiver = Receiver("test", flaky.deliver)
        ledger = UsageLedger("g", [receiver])
        for number in range(25):
            ledger.record(record(number))
        assert receiver.num_dropped == 15
        began = asyncio.get_running_loop().time()
        await ledger.close()
        assert asyncio.get_running_loop().time() - began == pytest.approx(limits.USAGE_FLUSH_S)
        assert (receiver.num_delivered, receiver.num_dropped) == (0, 25)

    run_simulation(main)


def test_what_waits_at_the_end_is_still_delivered():
    async def main() -> None:
        flaky = Flaky()
        ledger = UsageLedger("g", [Receiver("test", flaky.deliver)])
        ledger.record(record(1))
        await ledger.close()
        assert flaky.taken == ["r1"]
        await UsageLedger("g").close()

    run_simulation(main)


async def test_the_bus_carries_records_as_messages():
    bus = MemoryBus()
    sender, listener = bus.connect("gateway"), bus.connect("billing")
    came: list[bytes] = []
    subject = Subjects().usage_record
    await listener.subscribe(subject("*"), lambda delivery: came.append(delivery.payload))
    await listener.barrier()
    await BusSink(sender, subject).deliver([record(1), record(2)])
    async with asyncio.timeout(60):
        while len(came) < 2:
            await asyncio.sleep(0)
    assert [Decoder([UsageRecord]).decode(data) for data in came] == [record(1), record(2)]


async def test_a_file_gets_a_line_for_each_and_may_be_moved_away(tmp_path: Path):
    path = tmp_path / "usage.jsonl"
    sinks = [sink_of(f"file:{path}") for _ in range(2)]
    await asyncio.gather(*(sinks[number % 2].deliver([record(number), record(number)]) for number in range(20)))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["prompt_tokens"] for line in lines) == [*range(20)], "each once, whoever writes it again"
    assert (lines[0]["key"], lines[0]["outcome"], lines[0]["finish_reasons"]) == ("team", "completed", ["stop"])
    assert set(lines[0]) == set(UsageRecord.__struct_fields__)
    path.rename(tmp_path / "usage.1")
    await sinks[0].deliver([record(99)])
    assert json.loads(path.read_text())["request_id"] == "r99"


async def test_a_new_process_finds_in_the_file_what_the_former_one_wrote(tmp_path: Path, monkeypatch):
    path = tmp_path / "usage.jsonl"
    await sink_of(f"file:{path}").deliver([record(number) for number in range(40)])
    with path.open("a") as file:
        file.write("no record\n")
    await sink_of(f"file:{path}").deliver([record(39), record(40)])
    ids = [line.split('"')[3] for line in path.read_text().splitlines() if line.startswith("{")]
    assert ids == [f"r{number}" for number in range(41)]
    monkeypatch.setattr(limits, "USAGE_TAIL_BYTES", 1000)
    await sink_of(f"file:{path}").deliver([record(0), record(40)])
    assert path.read_text().count('"r0"') == 2, "only the end of the file is read"
    assert path.read_text().count('"r40"') == 1


async def test_a_full_disk_leaves_no_half_line():
    with pytest.raises(DeliveryError):
        await FileSink("/dev/full").deliver([record(1)])


class Webhook(HTTPServer):
    """A web server that refuses the first deliveries."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[tuple[str, bytes]] = []
        self.authorizations: list[str | None] = []
        self.refusals = 1


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        self.server.authorizations.append(self.headers["authorization"])
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/usage")
            self.end_headers()
            return
        if self.path == "/nonsense":
            self.wfile.write(b"no HTTP at all\r\n\r\n")
            return
        if self.server.refusals:
            self.server.refusals -= 1
            self.send_error(503)
            return
        self.server.bodies.append((self.headers["content-type"], body))
        self.send_response(204)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def test_a_web_server_gets_lines_and_is_tried_again(webhook: Webhook, monkeypatch):
    monkeypatch.setattr(usage, "RETRY_S", (0.01, 0.1))
    sink = sink_of(f"http://127.0.0.1:{webhook.server_port}/usage")
    assert isinstance(sink, WebhookSink)
    receiver = Receiver("sink", sink.deliver)
    for number in range(3):
        receiver.put(record(number))
    async with asyncio.timeout(60):
        while receiver.num_delivered < 3:
            await asyncio.sleep(0.01)
    [(kind, body)] = webhook.bodies
    assert kind == "application/x-ndjson"
    assert [json.loads(line)["request_id"] for line in body.splitlines()] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("path", ["moved", "nonsense"])
async def test_an_answer_that_is_no_success_is_a_failed_delivery(webhook: Webhook, path: str):
    webhook.refusals = 0
    with pytest.raises(DeliveryError):
        await WebhookSink(f"http://127.0.0.1:{webhook.server_port}/{path}").deliver([record(1)])
    assert webhook.bodies == []
    assert len(webhook.authorizations) == 1, "a redirect is not followed"


async def test_the_user_of_a_url_becomes_basic_authorization(webhook: Webhook, unused_port: int):
    webhook.refusals = 0
    await WebhookSink(f"http://me:p%40ss%3A@127.0.0.1:{webhook.server_port}/").deliver([record(1)])
    await WebhookSink(f"http://127.0.0.1:{webhook.server_port}/").deliver([record(1)])
    assert webhook.authorizations == ["Basic " + base64.b64encode(b"me:p@ss:").decode(), None]
    with pytest.raises(DeliveryError) as raised:
        await WebhookSink(f"http://me:secret@127.0.0.1:{unused_port}/").deliver([record(1)])
    assert "secret" not in str(raised.value)
    for unusable in ("http://me:secret@/x", "http://[::1/x"):
        with pytest.raises(SettingsError, match="not a usable URL"):
            sink_of(unusable)


async def test_a_web_server_that_is_not_there_is_a_failed_delivery(unused_port: int):
    with pytest.raises(DeliveryError):
        await WebhookSink(f"http://127.0.0.1:{unused_port}/").deliver([record(1)])


@pytest.mark.parametrize("word", ["usage.jsonl", "file:", "ftp://host/x", "http://", "https:path", "x file:y"])
def test_a_sink_that_is_none_is_refused(word: str):
    with pytest.raises(SettingsError, match=r"usage_sink: .* is not file:PATH or a URL"):
        validated(GatewaySettings, {"usage_sink": word})
    for good in ("file:x", "http://host", "https://host/path?x=1", ""):
        assert validated(GatewaySettings, {"usage_sink": good}).usage_sink == good


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(SettingsError, match="cannot be written"):
        sink_of(f"file:{tmp_path}/missing/usage.jsonl")
