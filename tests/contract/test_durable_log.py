"""What every durable log promises (`shared.bus.durable_log`), on a real NATS server and within the process."""

import asyncio

import pytest

from shared.bus.durable_log import BATCH_MESSAGES, LogConfig, Logged, LogUnavailableError
from shared.subjects import bucket_name


def log_of(transport, subjects, per_subject: int = 0, timeout_s: float = 2.0, **options):
    config = LogConfig(
        name=bucket_name(subjects.namespace, f"log{per_subject}"),
        subject=f"{subjects.namespace}.log{per_subject}.*",
        max_age_s=600.0,
        per_subject=per_subject,
        **{"storage": "memory", "max_bytes": 2**20, **options},
    )
    return transport.durable_log(config, timeout_s=timeout_s)


async def test_what_one_appends_another_finds_in_order(bus, subjects):
    one, two = [log_of(await bus.connect(name), subjects) for name in ("one", "two")]
    await one.open()
    await two.open()
    subject, other = f"{subjects.namespace}.log0.a", f"{subjects.namespace}.log0.b"
    assert await two.last(subject) is None
    first = await one.append(subject, b"1")
    await one.append(other, b"2")
    third = await one.append(subject, b"3")
    assert await two.last(subject) == Logged(third, b"3")
    assert await two.following(subject, 1) == Logged(first, b"1")
    assert await two.following(subject, first + 1) == Logged(third, b"3")
    assert await two.following(subject, third + 1) is None


async def test_several_open_a_log_that_takes_most_of_the_servers_memory(bus, subjects):
    logs = [log_of(await bus.connect(f"n{i}"), subjects, max_bytes=9 * 2**30) for i in range(4)]
    await asyncio.gather(*(log.open() for log in logs for _ in range(2)))
    await logs[1].open()
    assert await logs[0].append(f"{subjects.namespace}.log0.a", b"1") == 1


async def test_many_messages_are_read_in_order_without_a_request_for_each(bus, subjects):
    one = log_of(await bus.connect("one"), subjects, max_bytes=2**24)
    await one.open()
    subject, other = f"{subjects.namespace}.log0.a", f"{subjects.namespace}.log0.b"
    assert await one.all_following(subject, 1) == []
    count = BATCH_MESSAGES + 40
    numbers = [number for i in range(count) if (number := await one.append(subject, b"%d" % i)) is not None]
    await one.append(other, b"x")
    found = await one.all_following(subject, 1)
    assert found == [Logged(number, b"%d" % i) for i, number in enumerate(numbers)]
    assert await one.all_following(subject, numbers[-2]) == found[-2:]
    assert await one.all_following(subject, numbers[-1] + 1) == []
    assert len(await one.all_following(f"{subjects.namespace}.log0.*", 1)) == count + 1
    large = [await one.append(other, bytes(2**19)) for _ in range(12)]
    assert [each.sequence for each in await one.all_following(other, large[0] or 0)] == large


async def test_of_two_writers_that_expect_the_same_last_message_one_writes(bus, subjects):
    one, two = [log_of(await bus.connect(name), subjects, per_subject=1) for name in ("one", "two")]
    await one.open()
    subject = f"{subjects.namespace}.log1.a"
    first = await one.append(subject, b"1", last=0)
    assert await two.append(subject, b"x", last=0) is None
    second = await two.append(subject, b"2", last=first)
    assert await one.append(subject, b"y", last=first) is None
    assert await one.last(subject) == Logged(second, b"2")
    assert await one.following(subject, 1) == Logged(second, b"2"), "only the last one is kept"


@pytest.mark.nats
async def test_a_log_in_files_survives_its_server_and_one_in_memory_does_not(
    private_nats_server, nats_connect, subjects
):
    transport = await nats_connect(private_nats_server, "one")
    kept = log_of(transport, subjects, storage="file", timeout_s=0.5)
    lost = log_of(transport, subjects, per_subject=1, timeout_s=0.5)
    for log in (kept, lost):
        await log.open()
    number = await kept.append(f"{subjects.namespace}.log0.a", b"1")
    await lost.append(f"{subjects.namespace}.log1.a", b"1")
    private_nats_server.kill()
    with pytest.raises(LogUnavailableError):
        await kept.last(f"{subjects.namespace}.log0.a")
    private_nats_server.start()
    await transport.barrier()
    for log in (kept, lost):
        await log.open()
    assert await kept.last(f"{subjects.namespace}.log0.a") == Logged(number, b"1")
    assert await lost.last(f"{subjects.namespace}.log1.a") is None


@pytest.mark.nats
async def test_the_limits_of_a_log_can_be_changed_but_not_where_it_is(nats_server, nats_connect, subjects):
    transport = await nats_connect(nats_server, "one")
    await log_of(transport, subjects).open()
    await log_of(transport, subjects, max_bytes=2**21).open()
    with pytest.raises(LogUnavailableError, match="storage"):
        await log_of(transport, subjects, storage="file").open()
