"""Detokenizer processes on a real server, with the test as gateway and engine: text survives loss, death and moving."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from antiphon.shared.actors.actor import ask
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.transport import Delivery
from antiphon.shared.codec import Decoder, encode, pack_ids
from antiphon.shared.messages import (
    Ack,
    Cancel,
    ErrorReply,
    GatewayStatus,
    Heartbeat,
    OpenStream,
    Resend,
    TextEvent,
    TextEvents,
    TokenEvent,
    TokenEvents,
)
from antiphon.shared.subjects import Subjects
from tests.conftest import Connect, NatsServer
from tests.service_processes import Processes, Roster
from tests.support.heartbeats import heartbeat
from tests.tokenizer_files import HARD_TEXTS, byte_level, write_tokenizer_files

pytestmark = pytest.mark.nats
REPLIES = Decoder([Ack, ErrorReply])
NUM_STREAMS = 24
STOP = " STOP"


@dataclass
class Owned:
    """One sequence: what its engine generates, and what its owner has."""

    sequence_id: str
    truth: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    generated: int = 0
    cancelled: bool = False

    def take(self, event: TextEvent) -> None:
        overlap, text_overlap = len(self.token_ids) - event.position, len(self.text) - event.text_offset
        if overlap < 0 or text_overlap < 0 or self.finish_reason:
            return
        self.token_ids += event.token_ids[overlap:]
        self.text += event.text[text_overlap:]
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason


class Rig:
    """The gateway `g` and the engine `e` of the test."""

    def __init__(self, transport: NatsTransport, subjects: Subjects, processes: Processes, roster: Roster) -> None:
        self.transport, self.subjects, self.processes, self.roster = transport, subjects, processes, roster
        self.tokenizer = byte_level()
        self.random = random.Random(7)
        self.owned: dict[str, Owned] = {}
        self.resends = 0
        self.drop = 0.0
        self.progress = asyncio.Event()
        self.replays: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.detokenizer: Heartbeat | None = None

    async def listen(self) -> None:
        control, texts = Decoder([Resend, Cancel]), Decoder([TextEvents])

        def on_control(delivery: Delivery) -> None:
            message = control.decode(delivery.payload)
            if isinstance(message, Resend):
                self.resends += 1
                self.replays.put_nowait((message.sequence_id, message.position))
            else:
                self.owned[message.sequence_id].cancelled = True
            self.progress.set()

        def on_text(delivery: Delivery) -> None:
            for event in texts.decode(delivery.payload).events:
                self.owned[event.sequence_id].take(event)
            self.progress.set()

        await self.transport.subscribe(self.subjects.engine_control("e", "b"), on_control)
        await self.transport.subscribe(self.subjects.gateway_text("g", "b"), on_text)
        await self.transport.barrier()

    async def use(self, detokenizer: Heartbeat) -> None:
        """Opens every unfinished stream there, with what its owner has."""
        self.detokenizer = detokenizer
        await self.heartbeat()
        for owned in self.owned.values():
            if owned.finish_reason is None:
                await self.open(owned)

    async def open(self, owned: Owned, **options: Any) -> None:
        assert self.detokenizer is not None
        message = OpenStream(
            sequence_id=owned.sequence_id, attempt=1, model="m", reply_subject=self.subjects.gateway_text("g", "b"),
            engine_subject=self.subjects.engine_control("e", "b"),
            output_token_ids=pack_ids(owned.token_ids), text_offset=len(owned.text), stop=(STOP,), **options,
        )  # fmt: skip
        control = self.subjects.detokenizer_control(self.detokenizer.id, self.detokenizer.instance_id)
        assert await ask(self.transport, control, message, REPLIES, timeout_s=60) == Ack(owned.sequence_id)

    async def heartbeats(self) -> None:
        """Tells the detokenizers without end that the gateway lives: they drop the streams of a silent one."""
        while True:
            await self.heartbeat()
            await asyncio.sleep(0.25)

    async def heartbeat(self) -> None:
        beat = heartbeat("gateway", "g", "b", GatewayStatus(num_requests=len(self.owned)), interval_s=0.25)
        await self.transport.publish(self.subjects.heartbeat("gateway", "g"), encode(beat))

    async def step(self) -> None:
        """One token for every sequence that still runs; some messages are lost."""
        running = [o for o in self.owned.values() if o.generated < len(o.truth) and not o.cancelled]
        events = tuple(self.event(owned, owned.generated, owned.generated + 1) for owned in running)
        for owned in running:
            owned.generated += 1
        if self.random.random() >= self.drop:
            await self.publish(*events)
        while not self.replays.empty():
            await self.replay(*self.replays.get_nowait())

    async def replay(self, sequence_id: str, position: int) -> None:
        owned = self.owned[sequence_id]
        await self.publish(self.event(owned, position, owned.generated))

    def event(self, owned: Owned, start: int, end: int) -> TokenEvent:
        finish = "length" if end == len(owned.truth) else None
        return TokenEvent(
            sequence_id=owned.sequence_id,
            attempt=1,
            position=start,
            token_ids=tuple(owned.truth[start:end]),
            finish_reason=finish,
        )

    async def publish(self, *events: TokenEvent) -> None:
        assert self.detokenizer is not None
        sink = self.subjects.detokenizer_tokens(self.detokenizer.id, self.detokenizer.instance_id)
        await self.transport.publish(sink, encode(TokenEvents("e", "b", 1, events)))

    async def run_until(self, share: float) -> None:
        """Generates until every sequence has this share of its tokens."""
        while any(o.generated < share * len(o.truth) and not o.cancelled for o in self.owned.values()):
            await self.step()
            await self.transport.barrier()

    async def finish(self) -> None:
        """Generates to the end, answering what is asked for again."""
        await self.run_until(1.0)
        async with asyncio.timeout(60):
            while any(owned.finish_reason is None for owned in self.owned.values()):
                self.progress.clear()
                while not self.replays.empty():
                    await self.replay(*self.replays.get_nowait())
                await self.progress.wait()

    def check(self) -> None:
        for owned in self.owned.values():
            whole = self.tokenizer.decode(owned.truth)
            text, stop, _ = whole.partition(STOP)
            assert owned.text == text
            if stop:
                assert (owned.finish_reason, owned.stop_reason) == ("stop", STOP)
                assert self.tokenizer.decode(owned.token_ids).startswith(text + stop)
                assert len(owned.token_ids) < len(owned.truth)
            else:
                assert owned.finish_reason == "length"
                assert owned.token_ids == owned.truth


@pytest.fixture
async def rig(
    nats_server: NatsServer, nats_connect: Connect, subjects: Subjects, namespace: str, tmp_path: Path
) -> AsyncIterator[Rig]:
    directory = write_tokenizer_files(tmp_path / "model", byte_level())
    processes, roster = Processes(nats_server, namespace), Roster()
    transport = await nats_connect(nats_server, "peer")
    await roster.listen(transport, subjects)
    for name in ("d1", "d2"):
        await processes.start("detokenizer", name, directory)
    rig = Rig(transport, subjects, processes, roster)
    await rig.listen()
    texts = [" ".join(HARD_TEXTS[n % 4 : n % 4 + 3]) for n in range(NUM_STREAMS)]
    for n, text in enumerate(texts):
        text += f"{STOP} and more {n}" if n % 3 == 0 else ""
        rig.owned[f"r{n}"] = Owned(f"r{n}", rig.tokenizer.encode(text, add_special_tokens=False).ids)
    beating = asyncio.create_task(rig.heartbeats())
    yield rig
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    await processes.close()


@pytest.mark.spec("S-API-030")
async def test_streams_end_at_their_stop_string_and_the_engine_is_told(rig: Rig) -> None:
    await rig.use(await rig.roster.wait_for("d1"))
    await rig.finish()
    rig.check()
    async with asyncio.timeout(60):
        while not all(o.cancelled for o in rig.owned.values() if o.finish_reason == "stop"):
            rig.progress.clear()
            await rig.progress.wait()
    assert not any(o.cancelled for o in rig.owned.values() if o.finish_reason != "stop")


async def test_lost_token_messages_are_asked_for_and_the_text_is_the_same(rig: Rig) -> None:
    rig.drop = 0.2
    await rig.use(await rig.roster.wait_for("d1"))
    await rig.run_until(0.9)
    rig.drop = 0.0
    await rig.finish()
    rig.check()
    assert rig.resends > 0


@pytest.mark.matrix("R-08")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_of_a_dead_or_frozen_detokenizer_go_on_elsewhere(rig: Rig, fault: signal.Signals) -> None:
    await rig.use(await rig.roster.wait_for("d1"))
    await rig.run_until(0.4)
    rig.processes.signal("d1", fault)
    await rig.run_until(0.6)
    await rig.use(await rig.roster.wait_for("d2"))
    for owned in rig.owned.values():
        await rig.replay(owned.sequence_id, len(owned.token_ids))
    if fault == signal.SIGSTOP:
        rig.processes.signal("d1", signal.SIGCONT)
    await rig.finish()
    rig.check()


@pytest.mark.matrix("R-11")
async def test_a_drained_detokenizer_finishes_its_streams_and_exits(rig: Rig) -> None:
    await rig.use(await rig.roster.wait_for("d1"))
    await rig.run_until(0.3)
    rig.processes.signal("d1", signal.SIGTERM)
    await rig.finish()
    rig.check()
    assert await rig.processes.ended("d1") == 0
