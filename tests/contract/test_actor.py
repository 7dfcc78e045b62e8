"""The failure rule of `antiphon.shared.actors.actor`, sentence by sentence, on both buses."""

import asyncio
import logging

import pytest

from antiphon.shared import codec, limits
from antiphon.shared.actors.actor import Actor, Envelope, ask, handles
from antiphon.shared.bus.transport import NoRespondersError
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    Ack,
    Cancel,
    CloseStream,
    DetokenizeReply,
    DetokenizeRequest,
    Done,
    ErrorReply,
    Message,
)
from antiphon.shared.observability.rare_logs import RareLog

REPLIES = codec.Decoder((Ack, DetokenizeReply, ErrorReply))


class Subject(Actor):
    """Does what the message's id says, and notes everything that happens to it."""

    def __init__(self, transport, **options) -> None:
        super().__init__("subject", transport, **options)
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.busy = asyncio.Event()
        self.noted = asyncio.Event()

    def note(self, text: str) -> None:
        self.log.append(text)
        self.noted.set()

    async def noted_all(self, count: int) -> list[str]:
        async with asyncio.timeout(60):
            while len(self.log) < count:
                self.noted.clear()
                await self.noted.wait()
        return self.log

    async def act(self, order: str) -> None:
        self.note(order)
        if order == "wait":
            self.busy.set()
            await self.gate.wait()
        if order == "refuse":
            raise ServiceError("invalid_value", "Not this one.", param="prompt", retry_after_s=2.0)
        if order == "fail":
            raise KeyError("a detail of no concern to the user")
        assert order != "break", "the invariant"

    @handles(DetokenizeRequest)
    async def on_request(self, envelope: Envelope) -> Message:
        assert isinstance(envelope.message, DetokenizeRequest)
        await self.act(envelope.message.request_id)
        return Ack(envelope.message.request_id)

    @handles(Cancel)
    async def on_command(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Cancel)
        await self.act(envelope.message.sequence_id)

    @handles(Done)
    def on_plain(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Done)
        self.note(f"plain {envelope.message.sequence_id}")

    @handles(CloseStream)
    def on_too_much(self, envelope: Envelope) -> Message:
        assert isinstance(envelope.message, CloseStream)
        return DetokenizeReply(envelope.message.sequence_id, "x" * limits.BUS_PAYLOAD_BYTES)

    async def on_stop(self) -> None:
        self.note("stop")

    async def on_crash(self, error: BaseException) -> None:
        self.note(f"crash {type(error).__name__}")


class Stage:
    """A running subject and a client to talk to it."""

    def __init__(self, subject: Subject, client, address: str) -> None:
        self.subject = subject
        self.address = address
        self._client = client
        self.running = asyncio.create_task(subject.run())

    async def ask(self, order: str) -> Message:
        request = DetokenizeRequest(order, "model", b"")
        return await ask(self._client, self.address, request, REPLIES, timeout_s=60)

    def ask_soon(self, order: str) -> asyncio.Task[Message]:
        return asyncio.create_task(self.ask(order))

    async def tell(self, *messages: Message) -> None:
        for message in messages:
            await self._client.publish(self.address, codec.encode(message))
        await self._client.barrier()

    async def send(self, payload: bytes) -> Message:
        delivery = await self._client.request(self.address, payload, timeout_s=60)
        return REPLIES.decode(delivery.payload)


@pytest.fixture
async def stage(bus, namespace):
    async with asyncio.timeout(60):
        subject = Subject(await bus.connect("subject"), mailbox_max=4)
        address = f"{namespace}.subject"
        await subject.bind(address, DetokenizeRequest, Cancel, Done, CloseStream)
        await subject.transport.barrier()
        stage = Stage(subject, await bus.connect("client"), address)
        yield stage
        stage.running.cancel()
        await asyncio.wait({stage.running})
        if not stage.running.cancelled():
            stage.running.exception()


def refusal(task: asyncio.Task) -> ServiceError:
    error = task.exception()
    assert isinstance(error, ServiceError)
    return error


async def test_messages_are_handled_one_at_a_time_in_the_order_of_arrival(stage):
    await stage.tell(Cancel("wait", 1), Done("1", 1), Cancel("2", 1), Done("3", 1))
    await stage.subject.busy.wait()
    assert stage.subject.log == ["wait"]
    stage.subject.gate.set()
    assert await stage.subject.noted_all(4) == ["wait", "plain 1", "2", "plain 3"]


async def test_what_a_handler_returns_is_the_reply(stage):
    assert await stage.ask("hello") == Ack("hello")


async def test_a_handler_that_raises_service_error_fails_that_message_and_no_other(stage):
    with pytest.raises(ServiceError) as failure:
        await stage.ask("refuse")
    error = failure.value
    assert (error.code, error.message, error.param, error.retry_after_s) == (
        "invalid_value",
        "Not this one.",
        "prompt",
        2.0,
    )
    assert await stage.ask("hello") == Ack("hello")


async def test_a_failure_that_nobody_waits_for_is_logged_and_the_actor_goes_on(stage, caplog):
    with caplog.at_level(logging.WARNING):
        await stage.tell(Cancel("refuse", 1))
        assert await stage.ask("hello") == Ack("hello")
    assert [record.message for record in caplog.records if "Not this one." in record.message]


async def test_any_other_exception_is_an_internal_error_and_its_traceback_is_logged(stage, caplog):
    with pytest.raises(ServiceError) as failure:
        await stage.ask("fail")
    assert failure.value.code == "internal_error"
    assert "detail" not in failure.value.message
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


async def test_a_reply_that_does_not_fit_the_bus_fails_its_message_and_no_other(stage):
    reply = await stage.send(codec.encode(CloseStream("big", 1)))
    assert isinstance(reply, ErrorReply)
    assert reply.code == "request_too_large"
    assert await stage.ask("hello") == Ack("hello")


async def test_a_broken_invariant_stops_the_actor_and_run_raises(stage):
    await stage.tell(Cancel("break", 1))
    with pytest.raises(AssertionError, match="the invariant"):
        await stage.running


async def test_the_request_that_broke_the_invariant_is_answered(stage):
    with pytest.raises(ServiceError) as failure:
        await stage.ask("break")
    assert failure.value.code == "actor_stopped"
    assert failure.value.retryable


async def test_what_waits_in_the_mailbox_of_a_crashed_actor_is_answered(stage):
    waits = stage.ask_soon("wait")
    await stage.subject.busy.wait()
    await stage.tell(Cancel("break", 1))
    left = [stage.ask_soon("left") for _ in range(3)]
    await asyncio.sleep(0)  # They are published.
    await stage.send(b"\x91\xa3Nix")  # answered at once, so everything before it is in the mailbox
    stage.subject.gate.set()
    await asyncio.wait([waits, *left])
    assert waits.result() == Ack("wait")
    assert [refusal(task).code for task in left] == ["actor_stopped"] * 3
    assert "left" not in stage.subject.log


async def test_what_arrives_after_the_crash_is_answered_or_finds_nobody(stage):
    await stage.tell(Cancel("break", 1))
    await asyncio.wait({stage.running})
    with pytest.raises(NoRespondersError):
        await stage.ask("too late")
    reply = asyncio.Event()
    await stage.subject.transport.subscribe(f"{stage.address}.reply", lambda delivery: reply.set())
    await stage.subject.transport.barrier()
    stage.subject.put(Envelope(Done("1", 1), stage.address, f"{stage.address}.reply"))
    await reply.wait()


async def test_on_crash_runs_once_and_never_together_with_on_stop(stage):
    await stage.tell(Cancel("break", 1))
    await asyncio.wait({stage.running})
    assert stage.subject.log == ["break", "crash AssertionError"]


async def test_an_orderly_stop_handles_what_has_arrived_and_never_runs_on_crash(stage):
    await stage.tell(Cancel("wait", 1), Done("1", 1), Done("2", 1))
    await stage.subject.busy.wait()
    stopping = asyncio.create_task(stage.subject.stop())
    stage.subject.gate.set()
    await stopping
    await stage.running
    assert stage.subject.log == ["wait", "plain 1", "plain 2", "stop"]
    with pytest.raises(NoRespondersError):
        await stage.ask("too late")


async def test_a_request_that_finds_the_mailbox_full_is_refused_as_overload(stage):
    waits = stage.ask_soon("wait")
    await stage.subject.busy.wait()
    await stage.tell(*(Done(str(number), 1) for number in range(4)))
    with pytest.raises(ServiceError) as failure:
        await stage.ask("one too many")
    assert failure.value.code == "server_is_overloaded"
    assert failure.value.retry_after_s > 0
    assert stage.subject.overflowed == 1
    stage.subject.gate.set()
    assert await waits == Ack("wait")
    await stage.subject.settle()
    assert stage.subject.log == ["wait", *(f"plain {number}" for number in range(4))]


@pytest.mark.matrix("B-16")
async def test_any_other_message_that_finds_the_mailbox_full_is_counted_and_logged(stage, caplog):
    with caplog.at_level(logging.WARNING):
        await stage.tell(Cancel("wait", 1))
        await stage.subject.busy.wait()
        await stage.tell(*(Done(str(number), 1) for number in range(7)))
        await stage.send(b"\x91\xa3Nix")  # answered at once, so everything before it has arrived
    assert stage.subject.overflowed == 3
    logged = [record.message for record in caplog.records if "mailbox full" in record.message]
    assert [line.rpartition("(")[2] for line in logged] == ["1 so far)", "2 so far)"]
    stage.subject.gate.set()
    await stage.subject.settle()
    assert stage.subject.log[1:] == [f"plain {number}" for number in range(4)]


@pytest.mark.matrix("S-04", "B-17")
@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91\xa3Nix", codec.encode(Ack("not handled"))])
async def test_a_malformed_message_is_counted_and_answered_and_the_actor_goes_on(stage, payload):
    reply = await stage.send(payload)
    assert isinstance(reply, ErrorReply)
    assert reply.code == "internal_error"
    assert stage.subject.malformed == 1
    assert await stage.ask("hello") == Ack("hello")


async def test_a_flood_of_wrong_messages_is_counted_and_logged_once_in_an_interval(stage, caplog):
    subject = stage.subject
    subject._rare = RareLog(logging.getLogger("flood"), 3600.0)
    with caplog.at_level(logging.WARNING, "flood"):
        for number in range(50):
            await stage._client.publish(stage.address, b"\xc1")
            await stage.tell(Cancel("refuse", 1), Cancel("fail", 1))
            await subject.noted_all(2 * (number + 1))
            await subject.settle()
    assert subject.malformed == 50
    assert len(caplog.records) == 3


async def test_a_failure_that_cannot_be_told_is_logged_and_the_actor_goes_on(stage, caplog):
    """The bus is gone when the error reply is due."""
    subject = stage.subject

    def send(*args, **kwargs) -> None:
        raise ServiceError("bus_unavailable", "The bus is away.")

    subject.transport.send = send
    with caplog.at_level(logging.WARNING):
        subject.put(Envelope(DetokenizeRequest("refuse", "model", b""), stage.address, "somewhere"))
        subject.put(Envelope(DetokenizeRequest("hello", "model", b""), stage.address, "somewhere"))
        assert await subject.noted_all(2) == ["refuse", "hello"]
        await subject.settle()
    assert [record.message.partition(" (")[2][:15] for record in caplog.records] == [
        "invalid_value):",
        "bus_unavailable",
    ]
    assert not stage.running.done()


async def test_settle_returns_after_a_crash(stage):
    await stage.tell(Cancel("break", 1))
    await asyncio.wait({stage.running})
    await asyncio.wait_for(stage.subject.settle(), 60)


async def test_a_subclass_keeps_the_handlers_of_its_base(bus, namespace):
    class More(Subject):
        @handles(ErrorReply)
        def on_error_reply(self, envelope: Envelope) -> None:
            assert isinstance(envelope.message, ErrorReply)
            self.note(f"error {envelope.message.code}")

    assert set(More.handlers) == {*Subject.handlers, ErrorReply}
    assert ErrorReply not in Subject.handlers
    actor = More(await bus.connect("more"))
    with pytest.raises(AssertionError):
        await actor.bind(f"{namespace}.x", Ack)


class Guest:
    """Handles messages for an actor. Some subclass of it may be what the actor gets."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @handles(Done)
    def on_done(self, envelope: Envelope[Done]) -> None:
        self.seen.append(envelope.message.sequence_id)


class GuestOfAKind(Guest):
    pass


@pytest.mark.parametrize("kind", [Guest, GuestOfAKind])
async def test_another_object_handles_messages_for_an_actor_also_with_what_it_has_inherited(bus, namespace, kind):
    async with asyncio.timeout(60):
        guest, client = kind(), await bus.connect("client")
        actor, other = [Actor(name, await bus.connect(name)) for name in ("hosting", "other")]
        actor.also_handles(guest)
        assert Done in actor.plain
        assert Done not in other.handlers
        running = asyncio.create_task(actor.run())
        await actor.bind(f"{namespace}.hosting", Done)
        await actor.transport.barrier()
        await client.publish(f"{namespace}.hosting", codec.encode(Done("r-0", 1)))
        await client.barrier()
        while not guest.seen:
            await asyncio.sleep(0.01)
        assert guest.seen == ["r-0"]
        await actor.stop()
        await running
