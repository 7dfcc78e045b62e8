"""A service as a real process: start-up, readiness, discovery, drain, exit codes."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from antiphon.shared import codec, limits
from antiphon.shared.actors.actor import ask
from antiphon.shared.bus.transport import NoRespondersError
from antiphon.shared.messages import Ack, CloseStream, Done, ErrorReply, Heartbeat

pytestmark = pytest.mark.nats
SCRIPT = Path(__file__).with_name("tiny_service.py")
REPLIES = codec.Decoder((Ack, ErrorReply))


class Process:
    """The tiny service and what the bus hears of it."""

    def __init__(self, process: asyncio.subprocess.Process, transport, subjects) -> None:
        self.process = process
        self.transport = transport
        self.subjects = subjects
        self.heartbeats: asyncio.Queue[Heartbeat] = asyncio.Queue()
        self.lines: list[str] = []

    def hear(self, delivery) -> None:
        self.heartbeats.put_nowait(codec.Decoder((Heartbeat,)).decode(delivery.payload))

    async def heartbeat(self, state: str) -> Heartbeat:
        async with asyncio.timeout(60):
            while (heartbeat := await self.heartbeats.get()).state != state:
                pass
        return heartbeat

    async def line(self, end: str) -> str:
        async with asyncio.timeout(60):
            while line := (await self.process.stderr.readline()).decode().rstrip("\n"):
                self.lines.append(line)
                if line.endswith(end):
                    return line
        raise AssertionError("\n".join(self.lines))

    async def exit_code(self) -> int:
        async with asyncio.timeout(60):
            self.lines += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()


@pytest.fixture
async def launch(nats_server, nats_connect, subjects, namespace):
    """`await launch(*flags)` starts the tiny service; whatever still runs at the end of the test is killed."""
    started: list[Process] = []

    async def launch(*flags: str, nats: str = "", credentials: str = "", **environ: str) -> Process:
        transport = await nats_connect(nats_server, f"watcher{len(started)}")
        argv = [f"--nats={nats or nats_server.url}", f"--namespace={namespace}", "--log-level=debug"]
        argv.append(f"--nats-credentials={credentials or nats_server.credentials}")
        environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), **environ}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SCRIPT), *argv, *flags, stderr=asyncio.subprocess.PIPE, env=environment
        )
        started.append(Process(process, transport, subjects))
        await transport.subscribe(subjects.heartbeats("detokenizer"), started[-1].hear)
        await transport.barrier()
        return started[-1]

    yield launch
    for process in started:
        if process.process.returncode is None:
            process.process.kill()
        await process.process.communicate()


async def tell_it(process: Process, heartbeat: Heartbeat, sequence_id: str = "r"):
    subject = process.subjects.detokenizer_control(heartbeat.id, heartbeat.instance_id)
    return await ask(process.transport, subject, CloseStream(sequence_id, 1), REPLIES, timeout_s=60)


@pytest.mark.parametrize("behaviour", ["good", "threaded"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_service_and_it_exits_with_0(launch, behaviour, number):
    process = await launch(f"--behaviour={behaviour}", "--drain-s=0.3")
    ready = await process.heartbeat("ready")
    assert await tell_it(process, ready) == Ack("r")
    process.process.send_signal(number)
    draining = await process.heartbeat("draining")
    assert (draining.id, draining.instance_id) == (ready.id, ready.instance_id)
    assert await tell_it(process, ready, "while draining") == Ack("while draining")
    assert await process.exit_code() == 0
    with pytest.raises(NoRespondersError):
        await tell_it(process, ready)
    messages = [line.split(f" {ready.id} ", 1)[1] for line in process.lines if " INFO " in line]
    assert messages == ["ready", "draining", "drained"]


async def test_its_heartbeats_say_who_it_is_and_its_log_lines_too(launch):
    process = await launch("--service-id=tiny-1")
    heartbeat = await process.heartbeat("ready")
    assert (heartbeat.service, heartbeat.id, heartbeat.protocol) == ("detokenizer", "tiny-1", limits.PROTOCOL_VERSION)
    assert heartbeat.status.num_streams == 7
    assert " INFO tiny-1 ready" in await process.line("ready")


async def test_without_an_id_it_is_named_after_service_host_and_process(launch):
    process = await launch()
    heartbeat = await process.heartbeat("ready")
    assert heartbeat.id.startswith("detokenizer-")
    assert heartbeat.id.endswith(f"-{process.process.pid}")


async def test_when_it_says_ready_a_request_reaches_it(launch):
    process = await launch()
    assert await tell_it(process, await process.heartbeat("ready")) == Ack("r")


async def test_a_second_signal_cuts_the_drain_short(launch):
    process = await launch("--drain-s=60")
    await process.heartbeat("ready")
    process.process.terminate()
    await process.heartbeat("draining")
    process.process.terminate()
    assert await process.exit_code() == 128 + signal.SIGTERM
    assert any("drain was cut short" in line for line in process.lines)


async def test_a_signal_before_it_is_ready_ends_it_at_once(launch):
    process = await launch("--behaviour=slow")
    await process.line("loading")
    process.process.terminate()
    assert await process.exit_code() == 0
    assert process.lines[-1].endswith("stopped before it was ready")


async def test_a_service_that_cannot_go_on_exits_with_13(launch):
    process = await launch()
    ready = await process.heartbeat("ready")
    subject = process.subjects.detokenizer_control(ready.id, ready.instance_id)
    await process.transport.publish(subject, codec.encode(Done("r", 1)))
    assert await process.exit_code() == 13
    assert any("AssertionError: told to break" in line for line in process.lines)


async def test_a_bug_during_start_up_exits_with_13_and_its_traceback(launch):
    process = await launch("--behaviour=broken")
    assert await process.exit_code() == 13
    assert any("KeyError" in line and "Traceback" in line for line in process.lines)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--behaviour=refused"], "There is no model at /nowhere."),
        (["--behaviour=unbuildable"], "The model cannot be read."),
        (["--service-id=a.b"], "service-id"),
        (["--namespace=a b"], "namespace"),
        (["--no-such-flag=1"], "--no-such-flag=1"),
        (["--drain-s=long"], "--drain-s"),
        (["--nats="], "--nats or ANTIPHON_NATS"),
        (["--nats-credentials=/nowhere"], "/nowhere"),
    ],
)
async def test_what_the_user_got_wrong_exits_with_78_and_a_sentence(launch, flags, reason):
    process = await launch(*flags)
    assert await process.exit_code() == 78
    said = [line for line in process.lines if " DEBUG " not in line]
    assert len(said) == 1
    assert reason in said[0]
    assert "Traceback" not in said[0]


async def test_refused_credentials_exit_with_78(launch, tmp_path):
    (tmp_path / "credentials").write_text("antiphon:wrong")
    process = await launch(credentials=str(tmp_path / "credentials"))
    assert await process.exit_code() == 78
    assert any("refuses" in line for line in process.lines)


async def test_a_service_that_is_done_exits_with_0(launch):
    process = await launch("--behaviour=over")
    assert await process.exit_code() == 0


async def test_losing_the_bus_for_good_exits_with_13(launch, private_nats_server):
    process = await launch(nats=private_nats_server.url, credentials=private_nats_server.credentials)
    await process.line("ready")
    private_nats_server.password = "changed"
    private_nats_server.write_config()
    private_nats_server.process.send_signal(signal.SIGHUP)
    assert await process.exit_code() == 13


async def test_it_answers_the_discovery_of_nats(launch):
    process = await launch("--service-id=tiny-2")
    ready = await process.heartbeat("ready")
    await process.line(" ready")
    await tell_it(process, ready)
    name = f"{process.subjects.namespace}-detokenizer"
    answers = {}
    for verb in ("PING", "INFO", "STATS"):
        for subject in (f"$SRV.{verb}.{name}", f"$SRV.{verb}.{name}.tiny-2"):
            delivery = await process.transport.request(subject, b"", timeout_s=60)
            answers[verb] = json.loads(delivery.payload)
            assert answers[verb]["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
            assert (answers[verb]["name"], answers[verb]["id"]) == (name, "tiny-2")
    assert answers["PING"]["metadata"]["instance_id"] == ready.instance_id
    control = process.subjects.detokenizer_control("tiny-2", ready.instance_id)
    assert answers["INFO"]["endpoints"][0]["subject"] == control
    assert answers["STATS"]["endpoints"][0]["num_requests"] == 1
    assert answers["STATS"]["endpoints"][0]["data"]["num_streams"] == 7


async def test_its_discovery_answers_are_those_that_nats_clients_read(launch):
    from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

    process = await launch("--service-id=tiny-3")
    await process.heartbeat("ready")
    await process.line(" ready")
    for verb, reader in (("PING", ServicePing), ("INFO", ServiceInfo), ("STATS", ServiceStats)):
        name = f"{process.subjects.namespace}-detokenizer"
        delivery = await process.transport.request(f"$SRV.{verb}.{name}", b"", timeout_s=60)
        answer = json.loads(delivery.payload)
        assert reader.from_dict(answer).to_dict() == answer


async def test_help_lists_the_flags_and_exits_with_0():
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        "--help",
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert b"--nats-credentials" in out
