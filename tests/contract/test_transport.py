"""What every bus promises (`shared/bus/transport.py`), on a real NATS server and on the bus within the process."""

import asyncio

import pytest

from antiphon.shared import limits
from antiphon.shared.bus.transport import Delivery, NoRespondersError, RequestTimeoutError
from antiphon.shared.errors import ServiceError


class Inbox:
    """Collects deliveries and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self._came = asyncio.Event()

    def __call__(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        self._came.set()

    @property
    def payloads(self) -> list[bytes]:
        return [delivery.payload for delivery in self.deliveries]

    async def wait(self, count: int = 1, timeout_s: float = 60.0) -> list[Delivery]:
        async with asyncio.timeout(timeout_s):
            while len(self.deliveries) < count:
                self._came.clear()
                await self._came.wait()
        return self.deliveries


async def subscribed(transport, subject: str, queue: str = "") -> Inbox:
    inbox = Inbox()
    await transport.subscribe(subject, inbox, queue=queue)
    await transport.barrier()
    return inbox


async def echo(transport, subject: str, queue: str = "") -> None:
    tasks: set[asyncio.Task] = set()

    def answer(delivery: Delivery) -> None:
        tasks.add(asyncio.create_task(transport.publish(delivery.reply, delivery.payload, headers=delivery.headers)))

    await transport.subscribe(subject, answer, queue=queue)
    await transport.barrier()


async def test_a_message_arrives_with_its_subject_payload_reply_and_headers(bus, namespace):
    one, two = await bus.connect("one"), await bus.connect("two")
    inbox = await subscribed(two, f"{namespace}.a")
    await one.publish(f"{namespace}.a", b"\x00payload", reply=f"{namespace}.r", headers={"traceparent": "00-1"})
    assert await inbox.wait() == [Delivery(f"{namespace}.a", b"\x00payload", f"{namespace}.r", {"traceparent": "00-1"})]


async def test_a_message_without_reply_and_headers_has_none(bus, namespace):
    one = await bus.connect("one")
    inbox = await subscribed(one, f"{namespace}.a")
    await one.publish(f"{namespace}.a", b"")
    assert await inbox.wait() == [Delivery(f"{namespace}.a", b"", "", None)]


async def test_messages_from_one_publisher_arrive_in_order(bus, namespace):
    one, two = await bus.connect("one"), await bus.connect("two")
    inbox = await subscribed(two, f"{namespace}.*")
    for number in range(2000):
        await one.publish(f"{namespace}.{number % 7}", str(number).encode())
    await inbox.wait(2000)
    assert inbox.payloads == [str(number).encode() for number in range(2000)]


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("a.*.c", {"a.b.c", "a.x.c"}),
        ("a.>", {"a.b.c", "a.x.c", "a.b"}),
        ("a.b", {"a.b"}),
        ("*", set()),
        (">", {"a.b.c", "a.x.c", "a.b", "b.b.c"}),
    ],
)
async def test_wildcards_match_tokens(bus, namespace, pattern, heard):
    one, two = await bus.connect("one"), await bus.connect("two")
    inbox = await subscribed(two, f"{namespace}.{pattern}")
    end = await subscribed(two, f"{namespace}-end")
    for subject in ("a.b.c", "a.x.c", "a.b", "b.b.c"):
        await one.publish(f"{namespace}.{subject}", b"")
    await one.publish(f"{namespace}-end", b"")
    await end.wait()
    await inbox.wait(len(heard))
    assert {delivery.subject.removeprefix(f"{namespace}.") for delivery in inbox.deliveries} == heard


async def test_a_queue_group_shares_the_messages_and_others_get_all(bus, namespace):
    sender, watcher = await bus.connect("sender"), await bus.connect("watcher")
    workers = [await bus.connect(f"worker{i}") for i in range(3)]
    shared, shares = Inbox(), [Inbox() for _ in workers]
    for worker, share in zip(workers, shares, strict=True):
        await worker.subscribe(f"{namespace}.job", lambda d, share=share: (share(d), shared(d)), queue="pool")
        await worker.barrier()
    everything = await subscribed(watcher, f"{namespace}.job")
    for number in range(300):
        await sender.publish(f"{namespace}.job", str(number).encode())
    await everything.wait(300)
    await shared.wait(300)
    assert all(len(share.deliveries) > 50 for share in shares)
    assert sorted(shared.payloads) == sorted(everything.payloads)


async def test_a_request_gets_its_answer(bus, namespace):
    one, two = await bus.connect("one"), await bus.connect("two")
    await echo(two, f"{namespace}.echo")
    answers = await asyncio.gather(
        *(one.request(f"{namespace}.echo", str(i).encode(), timeout_s=60, headers={"k": str(i)}) for i in range(50))
    )
    assert [answer.payload for answer in answers] == [str(i).encode() for i in range(50)]
    assert [answer.headers for answer in answers] == [{"k": str(i)} for i in range(50)]


async def test_a_request_that_nobody_hears_fails_at_once(bus, namespace):
    one = await bus.connect("one")
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(NoRespondersError):
        await one.request(f"{namespace}.nobody", b"", timeout_s=100)
    assert loop.time() - start < 60


async def test_a_request_without_an_answer_times_out(bus, namespace):
    one, two = await bus.connect("one"), await bus.connect("two")
    inbox = await subscribed(two, f"{namespace}.silent")
    with pytest.raises(RequestTimeoutError):
        await one.request(f"{namespace}.silent", b"", timeout_s=0.05)
    assert len(await inbox.wait()) == 1


async def test_a_late_answer_is_ignored_and_the_next_request_works(bus, namespace):
    one, two = await bus.connect("one"), await bus.connect("two")
    inbox = await subscribed(two, f"{namespace}.late")
    with pytest.raises(RequestTimeoutError):
        await one.request(f"{namespace}.late", b"", timeout_s=0.05)
    await two.publish((await inbox.wait())[0].reply, b"too late")
    await two.barrier()
    await echo(two, f"{namespace}.echo")
    assert (await one.request(f"{namespace}.echo", b"x", timeout_s=60)).payload == b"x"


async def test_a_publisher_hears_itself(bus, namespace):
    one = await bus.connect("one")
    inbox = await subscribed(one, f"{namespace}.self")
    await one.publish(f"{namespace}.self", b"1")
    assert len(await inbox.wait()) == 1


async def test_after_unsubscribing_nothing_more_comes_and_what_came_was_handled(bus, namespace):
    one, two = await bus.connect("one"), await bus.connect("two")
    inbox = Inbox()
    subscription = await two.subscribe(f"{namespace}.a", inbox)
    await two.barrier()
    for number in range(500):
        await one.publish(f"{namespace}.a", str(number).encode())
    await one.barrier()
    await subscription.unsubscribe()
    assert inbox.payloads == [str(number).encode() for number in range(500)]
    with pytest.raises(NoRespondersError):
        await one.request(f"{namespace}.a", b"", timeout_s=60)
    await subscription.unsubscribe()
    assert len(inbox.deliveries) == 500


async def test_a_member_that_leaves_a_queue_group_loses_no_message(bus, namespace):
    sender, stays, leaves = [await bus.connect(name) for name in ("sender", "stays", "leaves")]
    kept = await subscribed(stays, f"{namespace}.job", queue="pool")
    left = Inbox()
    subscription = await leaves.subscribe(f"{namespace}.job", left, queue="pool")
    await leaves.barrier()

    async def send() -> None:
        for number in range(1000):
            await sender.publish(f"{namespace}.job", str(number).encode())
            if number % 50 == 0:
                await sender.barrier()

    sending = asyncio.create_task(send())
    await left.wait(20)
    await subscription.unsubscribe()
    await sending
    await kept.wait(1000 - len(left.deliveries))
    assert sorted(kept.payloads + left.payloads) == sorted(str(number).encode() for number in range(1000))


@pytest.mark.matrix("B-15")
async def test_a_fresh_connection_misses_nothing_after_its_barrier(bus, namespace):
    """The start-up race: a subscription that the bus does not know yet loses the head of a stream without a word."""
    sender = await bus.connect("sender")
    for cycle in range(150 if bus.kind == "nats" else 20):
        fresh = await bus.connect(f"fresh{cycle}")
        inbox = await subscribed(fresh, f"{namespace}.{cycle}")
        for number in range(5):
            await sender.publish(f"{namespace}.{cycle}", str(number).encode())
        await sender.barrier()
        await inbox.wait(5)
        assert inbox.payloads == [b"0", b"1", b"2", b"3", b"4"], cycle
        await fresh.close()


async def test_many_subscriptions_are_known_after_one_barrier(bus, namespace):
    sender, fresh = await bus.connect("sender"), await bus.connect("fresh")
    inbox = Inbox()
    for number in range(200):
        await fresh.subscribe(f"{namespace}.{number}", inbox)
    await fresh.barrier()
    for number in range(200):
        await sender.publish(f"{namespace}.{number}", b"")
    assert len(await inbox.wait(200)) == 200


async def test_closing_sends_what_was_published(bus, namespace):
    one, two = await bus.connect("one"), await bus.connect("two")
    inbox = await subscribed(two, f"{namespace}.last")
    for number in range(100):
        await one.publish(f"{namespace}.last", str(number).encode())
    await one.close()
    assert not one.connected
    assert len(await inbox.wait(100)) == 100


async def test_publishing_after_closing_is_refused(bus, namespace):
    one = await bus.connect("one")
    await one.close()
    await one.close()
    for attempt in (one.publish(f"{namespace}.a", b""), one.barrier(), one.subscribe(f"{namespace}.a", Inbox())):
        with pytest.raises(ServiceError) as failure:
            await attempt
        assert failure.value.code == "bus_unavailable"


@pytest.mark.matrix("B-14")
async def test_the_largest_message_passes_and_a_larger_one_is_refused(bus, namespace):
    one = await bus.connect("one")
    inbox = await subscribed(one, f"{namespace}.big")
    payload = bytes(limits.BUS_PAYLOAD_BYTES - 1000)
    await one.publish(f"{namespace}.big", payload, headers={"traceparent": "0" * 55})
    assert (await inbox.wait())[0].payload == payload
    with pytest.raises(ServiceError) as failure:
        await one.publish(f"{namespace}.big", bytes(limits.BUS_PAYLOAD_BYTES + 1))
    assert failure.value.code == "request_too_large"
    assert f"max_payload is {limits.BUS_PAYLOAD_BYTES}" in failure.value.message
    assert one.connected


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB stolen 0\r\n", "a\tb"])
async def test_a_malformed_subject_is_refused_and_the_connection_lives(bus, namespace, subject):
    one = await bus.connect("one")
    with pytest.raises(ServiceError) as failure:
        await one.publish(subject, b"")
    assert failure.value.code == "internal_error"
    inbox = await subscribed(one, f"{namespace}.a")
    await one.publish(f"{namespace}.a", b"")
    assert len(await inbox.wait()) == 1


async def test_a_receiver_that_fails_does_not_stop_the_others(bus, namespace):
    one = await bus.connect("one")
    errors: list[str] = []
    one.on_error = lambda kind, error: errors.append(kind)

    def fail(delivery: Delivery) -> None:
        raise ValueError("on purpose")

    await one.subscribe(f"{namespace}.a", fail)
    inbox = await subscribed(one, f"{namespace}.a")
    await one.publish(f"{namespace}.a", b"1")
    await one.publish(f"{namespace}.a", b"2")
    await inbox.wait(2)
    await one.barrier()
    assert errors == ["receiver_failed", "receiver_failed"]
    assert one.counters["receiver_failed"] == 2


async def test_deliveries_are_counted_by_subscribed_subject(bus, namespace):
    one = await bus.connect("one")
    inbox = await subscribed(one, f"{namespace}.*")
    await one.publish(f"{namespace}.a", b"")
    await one.publish(f"{namespace}.b", b"")
    await inbox.wait(2)
    assert one.deliveries[f"{namespace}.*"] == 2


async def test_an_idle_connection_is_connected(bus):
    assert (await bus.connect("one")).connected
