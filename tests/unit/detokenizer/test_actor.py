"""The detokenizer's shell on the bus within the process: what it sends to whom, and what it drops."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.services.detokenizer.actor import DetokenizerActor
from antiphon.shared import limits
from antiphon.shared.actors.actor import ask
from antiphon.shared.actors.host import Host
from antiphon.shared.bus.transport import Delivery
from antiphon.shared.codec import Decoder, encode, pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    Ack,
    Cancel,
    CloseStream,
    ErrorReply,
    GatewayStatus,
    Message,
    OpenBatch,
    OpenBatchReply,
    OpenReply,
    OpenStream,
    OwnershipQuery,
    OwnershipReply,
    Resend,
    SequenceRef,
    TextEvents,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
    TopLogprob,
)
from antiphon.shared.observability import telemetry
from antiphon.shared.subjects import Subjects
from antiphon.shared.text.vocabulary import Vocabulary
from tests.support.heartbeats import heartbeat
from tests.support.memory import MemoryBus, MemoryTransport
from tests.tokenizer_files import byte_level, decoder_of, token_id

ENGINE = Subjects().engine_control("e1", "b1")
GATEWAY = Subjects().gateway_text("g1", "b1")
CONTROL = Subjects().gateway_control("g1", "b1")
REPLIES = Decoder([Ack, OpenBatchReply, ErrorReply])


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return round(self.now * 1e9)


class Rig:
    """A detokenizer, and the test in the place of its gateways and engines."""

    def __init__(self, bus: MemoryBus) -> None:
        self.clock = Clock()
        self.bus = bus
        self.peer: MemoryTransport = bus.connect("peer")
        self.own: MemoryTransport = bus.connect("detokenizer")
        self.tokenizer = byte_level()
        self.vocabulary = Vocabulary(self.tokenizer, decoder_of(self.tokenizer))
        self.received: dict[str, list[Message]] = {}
        self.subjects = Subjects()

    async def start(self, **options: Any) -> None:
        host = Host(transport=self.own, subjects=self.subjects, clock=self.clock, id="d1", instance_id="b1")
        self.actor = DetokenizerActor(host, self.vocabulary, "model", **options)
        await self.actor.listen()
        self.task = asyncio.create_task(self.actor.run())
        await self.listen(ENGINE, Resend, Cancel)
        await self.listen(GATEWAY, TextEvents)
        await self.listen(CONTROL, OwnershipQuery)

    async def stop(self) -> None:
        await self.actor.stop()
        await self.task
        await self.own.close()
        await self.peer.close()

    async def listen(self, subject: str, *types: type[Message]) -> None:
        decoder, items = Decoder(types), self.received.setdefault(subject, [])

        def receive(delivery: Delivery) -> None:
            items.append(decoder.decode(delivery.payload))

        await self.peer.subscribe(subject, receive)
        await self.peer.barrier()

    async def open(self, sequence_id: str = "r1", attempt: int = 1, model: str = "model", **options: Any) -> None:
        options = {"reply_subject": GATEWAY, "engine_subject": ENGINE, **options}
        message = OpenStream(sequence_id=sequence_id, attempt=attempt, model=model, **options)
        control = self.subjects.detokenizer_control("d1", "b1")
        reply = await ask(self.peer, control, message, REPLIES, timeout_s=60)
        assert reply == Ack(sequence_id)

    async def tell(self, message: Message) -> None:
        await self.peer.publish(self.subjects.detokenizer_control("d1", "b1"), encode(message))
        await self.settle()

    async def tokens(self, *events: TokenEvent, engine: str = "e1", step: int = 1) -> None:
        message = TokenEvents(engine, "b1", step, events)
        await self.peer.publish(self.subjects.detokenizer_tokens("d1", "b1"), encode(message))
        await self.settle()

    async def heartbeat(self, gateway: str) -> None:
        beat = heartbeat("gateway", gateway, "b1", GatewayStatus(), interval_s=0.25)
        await self.peer.publish(self.subjects.heartbeat("gateway", gateway), encode(beat))
        await self.settle()

    async def settle(self) -> None:
        """Returns when what was sent has been handled and what that gave has arrived here."""
        await self._fence(self.peer, self.own)
        await self.actor.settle()
        await self._fence(self.own, self.peer)

    async def _fence(self, sender: MemoryTransport, receiver: MemoryTransport) -> None:
        came = asyncio.Event()
        subscription = await receiver.subscribe("fence", lambda _: came.set())
        await sender.publish("fence", b"")
        await came.wait()
        await subscription.unsubscribe()

    def letters(self, text: str) -> tuple[int, ...]:
        return tuple(token_id(self.tokenizer, c) for c in text)

    def event(self, position: int, text: str, sequence_id: str = "r1", attempt: int = 1, **options: Any) -> TokenEvent:
        return TokenEvent(
            sequence_id=sequence_id, attempt=attempt, position=position, token_ids=self.letters(text), **options
        )

    def texts(self, subject: str = GATEWAY) -> str:
        messages = self.received[subject]
        return "".join(e.text for m in messages if isinstance(m, TextEvents) for e in m.events)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(MemoryBus())
    await rig.start()
    yield rig
    await rig.stop()


async def test_one_step_gives_one_message_to_each_gateway(rig: Rig) -> None:
    other = rig.subjects.gateway_text("g2", "b1")
    await rig.listen(other, TextEvents)
    await rig.open("r1")
    await rig.open("r2", reply_subject=other)
    await rig.open("r3")
    await rig.tokens(rig.event(0, "a"), rig.event(0, "b", "r2"), rig.event(0, "c", "r3"), step=7)
    (mine,), (others,) = rig.received[GATEWAY], rig.received[other]
    assert isinstance(mine, TextEvents)
    assert isinstance(others, TextEvents)
    assert (mine.detokenizer_id, mine.engine_id, mine.engine_instance_id, mine.step) == ("d1", "e1", "b1", 7)
    assert [(e.sequence_id, e.text) for e in mine.events] == [("r1", "a"), ("r3", "c")]
    assert [(e.sequence_id, e.text) for e in others.events] == [("r2", "b")]


async def test_a_gap_is_asked_for_at_most_every_interval_and_repaired(rig: Rig) -> None:
    await rig.open()
    await rig.tokens(rig.event(1, "b"))
    await rig.tokens(rig.event(2, "c"))
    assert rig.received[ENGINE] == [Resend("r1", 1, 0)]
    rig.clock.now += 2 * limits.RESEND_INTERVAL_S
    await rig.tokens(rig.event(3, "d"))
    assert rig.received[ENGINE] == [Resend("r1", 1, 0)] * 2
    assert rig.texts() == ""
    await rig.tokens(rig.event(0, "abcd", finish_reason="length"), step=0)
    assert rig.texts() == "abcd"
    assert rig.actor.num_streams == 0


async def test_a_gap_is_asked_for_again_when_nothing_more_comes(rig: Rig) -> None:
    await rig.open()
    await rig.tokens(rig.event(1, "b", finish_reason="length"))
    rig.clock.now += limits.HEARTBEAT_INTERVAL_S
    rig.actor.sweep()
    await rig.settle()
    assert rig.received[ENGINE] == [Resend("r1", 1, 0)] * 2
    assert rig.actor.resends == 2


async def test_a_stop_string_cancels_the_sequence_and_closes_the_stream(rig: Rig) -> None:
    await rig.open(stop=("!",))
    await rig.tokens(rig.event(0, "hi"))
    await rig.tokens(rig.event(2, "!x"))
    assert rig.texts() == "hi"
    assert rig.received[ENGINE] == [Cancel("r1", 1, "stop")]
    assert rig.actor.num_streams == 0
    await rig.tokens(rig.event(4, "y"))
    assert rig.actor.late_events == 1
    assert rig.texts() == "hi"


async def test_events_behind_the_end_in_the_same_message_change_nothing(rig: Rig) -> None:
    await rig.open(stop=("!", ""))
    await rig.tokens(rig.event(0, "hi!"), rig.event(3, "x"), rig.event(0, "hi!"))
    assert rig.texts() == "hi"
    assert rig.received[ENGINE] == [Cancel("r1", 1, "stop")]


@pytest.mark.matrix("S-03")
async def test_tokens_of_an_old_attempt_or_another_engine_are_dropped_and_counted(rig: Rig) -> None:
    await rig.open(attempt=2)
    await rig.tokens(rig.event(0, "x", attempt=1))
    await rig.tokens(rig.event(0, "y", attempt=2), engine="zombie")
    assert rig.actor.late_events == 2
    await rig.tokens(rig.event(0, "z", sequence_id="unknown"))
    rig.clock.now += limits.EARLY_EVENT_S + 0.1
    rig.actor.sweep()
    assert rig.actor.late_events == 3
    assert rig.texts() == ""


async def test_opening_again_replaces_the_stream_but_an_old_copy_does_not(rig: Rig) -> None:
    await rig.open(attempt=2)
    await rig.tokens(rig.event(0, "ab", attempt=2))
    await rig.open(attempt=3, output_token_ids=pack_ids(rig.letters("ab")), text_offset=2)
    await rig.open(attempt=2)
    await rig.tokens(rig.event(2, "c", attempt=3))
    assert rig.texts() == "abc"


async def test_a_close_is_idempotent_and_spares_a_newer_attempt(rig: Rig) -> None:
    await rig.open(attempt=2)
    await rig.tell(CloseStream("r1", 1))
    assert rig.actor.num_streams == 1
    await rig.tell(CloseStream("r1", 2))
    await rig.tell(CloseStream("r1", 2))
    assert rig.actor.num_streams == 0
    assert rig.actor.idle.is_set()


@pytest.mark.matrix("S-03", "R-06")
async def test_a_bad_token_ends_its_own_stream_only(rig: Rig) -> None:
    await rig.open("bad")
    await rig.open("good")
    await rig.tokens(
        TokenEvent(sequence_id="bad", attempt=1, position=0, token_ids=(10**6,)), rig.event(0, "a", "good")
    )
    (message,) = rig.received[GATEWAY]
    assert isinstance(message, TextEvents)
    assert [(e.sequence_id, e.finish_reason, e.text) for e in message.events] == [
        ("bad", "error", ""),
        ("good", None, "a"),
    ]
    assert rig.actor.num_streams == 1


async def test_what_cannot_be_served_is_refused_in_words(rig: Rig) -> None:
    with pytest.raises(ServiceError, match="does not exist") as model:
        await rig.open(model="another")
    assert model.value.code == "model_not_found"
    with pytest.raises(ServiceError, match="token ids"):
        await rig.open(output_token_ids=pack_ids([10**6]))
    with pytest.raises(ServiceError, match="token ids"):
        await rig.open(prompt_token_ids=b"odd")


async def test_a_span_is_recorded_once_when_a_stream_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[str, Any, Any, dict[str, Any]]] = []

    def record(name: str, start_ns: int, end_ns: int, **options: Any) -> None:
        spans.append((name, end_ns - start_ns, options["parent"], options["attributes"]))

    monkeypatch.setattr(telemetry, "enabled", lambda: True)
    monkeypatch.setattr(telemetry, "record_span", record)
    headers = {"traceparent": "00-1-2-01"}
    await rig.open(traceparent=headers["traceparent"])
    await rig.tokens(rig.event(0, "a"))
    rig.clock.now += 1
    await rig.tokens(rig.event(1, "b", finish_reason="length"))
    await rig.tell(CloseStream("r1", 1))
    ((name, duration_ns, parent, attributes),) = spans
    assert (name, duration_ns, parent) == ("detokenize", 10**9, headers)
    assert attributes == {
        telemetry.Names.USAGE_OUTPUT_TOKENS: 2,
        telemetry.Names.RESPONSE_FINISH_REASONS: ("length",),
    }


async def test_streams_are_bounded_and_one_more_is_refused() -> None:
    rig = Rig(MemoryBus())
    await rig.start(streams_max=2)
    await rig.open("r1")
    await rig.open("r2")
    await rig.open("r2", attempt=2)
    with pytest.raises(ServiceError) as full:
        await rig.open("r3")
    assert (full.value.code, full.value.retryable) == ("server_is_overloaded", True)
    assert full.value.retry_after_s > 0
    await rig.stop()


async def test_streams_of_a_silent_gateway_are_dropped(rig: Rig) -> None:
    await rig.open("r1")
    await rig.open("r2", reply_subject=rig.subjects.gateway_text("g2", "b1"))
    rig.clock.now += limits.ORPHAN_S - 1
    await rig.heartbeat("g1")
    rig.clock.now += 2
    rig.actor.sweep()
    assert rig.actor.num_streams == 1
    await rig.tokens(rig.event(0, "a"))
    assert rig.texts() == "a"


async def test_a_gateway_is_asked_about_streams_without_tokens_and_those_it_does_not_own_are_dropped(rig: Rig) -> None:
    for name in ("r1", "r2", "r3"):
        await rig.open(name)
    rig.clock.now += limits.ORPHAN_S + 1
    await rig.heartbeat("g1")
    await rig.tokens(rig.event(0, "a", "r3"))
    rig.actor.sweep()
    await rig.settle()
    (query,) = rig.received[CONTROL]
    assert isinstance(query, OwnershipQuery)
    assert [ref.sequence_id for ref in query.sequences] == ["r1", "r2"]
    assert rig.actor.num_streams == 3, "nothing is dropped before the gateway has said so"
    released = (SequenceRef("r1", 1), SequenceRef("r2", 7), SequenceRef("unknown", 1))
    await rig.tell(OwnershipReply("another", "b1", (SequenceRef("r2", 1),)))
    await rig.tell(OwnershipReply("g1", "b1", released))
    assert rig.actor.num_streams == 2
    await rig.tokens(rig.event(0, "b", "r2"))
    assert rig.texts() == "ab"


async def test_tokens_that_come_before_their_stream_are_not_lost(rig: Rig) -> None:
    await rig.tokens(rig.event(0, "a"))
    await rig.tokens(rig.event(1, "b", finish_reason="length"))
    await rig.tokens(rig.event(0, "zombie"), engine="zombie")
    assert rig.received[GATEWAY] == []
    await rig.open()
    assert rig.texts() == "ab"
    assert rig.actor.num_streams == 0
    assert rig.actor.late_events == 1


async def test_early_tokens_behind_a_gap_have_it_asked_for_as_the_stream_opens(rig: Rig) -> None:
    await rig.tokens(rig.event(1, "b"))
    await rig.open()
    assert rig.received[ENGINE] == [Resend("r1", 1, 0)]


async def test_each_stream_of_a_batch_is_opened_or_refused_by_itself(rig: Rig) -> None:
    good, bad = (
        OpenStream(sequence_id="r1", attempt=1, model="model", reply_subject=GATEWAY, engine_subject=ENGINE),
        OpenStream(sequence_id="r2", attempt=1, model="another", reply_subject=GATEWAY, engine_subject=ENGINE),
    )
    control = rig.subjects.detokenizer_control("d1", "b1")
    reply = await ask(rig.peer, control, OpenBatch((good, bad)), REPLIES, timeout_s=60)
    assert isinstance(reply, OpenBatchReply)
    assert reply.replies[0] == OpenReply(sequence_id="r1", attempt=1)
    assert (reply.replies[1].code, reply.replies[1].param) == ("model_not_found", "model")
    await rig.tokens(rig.event(0, "a"))
    assert rig.texts() == "a"


async def test_gateways_are_not_called_silent_while_this_side_is_cut_off(rig: Rig) -> None:
    await rig.open()
    await rig.heartbeat("g1")
    rig.bus.partition("detokenizer")
    for _ in range(3):
        rig.clock.now += limits.ORPHAN_S - 1
        rig.actor.sweep()
    rig.bus.heal("detokenizer")
    rig.actor.sweep()
    assert rig.actor.num_streams == 1


async def test_a_message_too_large_for_the_bus_is_sent_in_parts(rig: Rig) -> None:
    rig.bus.max_payload = 2**20
    top = tuple(TopLogprob(i, -1.0) for i in range(20))
    for n in range(24):
        await rig.open(f"r{n}")
    logprobs = tuple(TokenLogprobs(-1.0, top) for _ in range(200))
    for n in range(24):  # each alone fits into a message, all texts together do not
        await rig.tokens(rig.event(200, "b" * 200, f"r{n}", logprobs=logprobs))
    rig.received[ENGINE].clear()
    await rig.tokens(*(rig.event(0, "a" * 200, f"r{n}") for n in range(24)))
    assert len(rig.received[GATEWAY]) > 1
    assert rig.texts().count("a") == rig.texts().count("b") == 24 * 200


async def test_text_that_cannot_be_sent_is_counted_and_hurts_nobody_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.open()
    send = rig.own.send

    def refuse(subject: str, payload: bytes) -> None:
        if subject == GATEWAY:
            raise ServiceError("bus_unavailable", "The bus cannot be reached.")
        send(subject, payload)

    monkeypatch.setattr(rig.own, "send", refuse)
    await rig.tokens(rig.event(0, "a"))
    assert rig.actor.unsent == 1
    await rig.open("r2")
