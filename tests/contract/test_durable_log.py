"""What every durable log promises (`antiphon.shared.bus.durable_log`), on a real NATS server and within the process."""

import asyncio

import pytest
from nats.js.api import RePublish

from antiphon.shared.bus.durable_log import BATCH_MESSAGES, LogConfig, Logged, LogUnavailableError
from antiphon.shared.errors import ServiceError
from antiphon.shared.subjects import bucket_name

TIMEOUT_S = 60.0
"""For operations that are answered."""


def config_of(subjects, per_subject: int = 0, **options) -> LogConfig:
    return LogConfig(
        name=bucket_name(subjects.namespace, f"log{per_subject}"),
        subject=f"{subjects.namespace}.log{per_subject}.*",
        max_age_s=600.0,
        per_subject=per_subject,
        **{"storage": "memory", "max_bytes": 2**20, **options},
    )


async def make(transport, config: LogConfig) -> None:
    await transport.make_store(config, replicas=1, timeout_s=60.0)


async def log_of(transport, subjects, timeout_s: float = TIMEOUT_S, **options):
    """A log that exists."""
    config = config_of(subjects, **options)
    await make(transport, config)
    return transport.durable_log(config, timeout_s=timeout_s)


async def test_what_one_appends_another_finds_in_order(bus, subjects):
    one, two = [await log_of(await bus.connect(name), subjects) for name in ("one", "two")]
    subject, other = f"{subjects.namespace}.log0.a", f"{subjects.namespace}.log0.b"
    assert await two.last(subject) is None
    first = await one.append(subject, b"1")
    await one.append(other, b"2")
    third = await one.append(subject, b"3")
    assert await two.last(subject) == Logged(third, b"3")
    assert await two.following(subject, 1) == Logged(first, b"1")
    assert await two.following(subject, first + 1) == Logged(third, b"3")
    assert await two.following(subject, third + 1) is None


async def test_several_make_a_log_that_takes_most_of_the_servers_memory(bus, subjects):
    transports = [await bus.connect(f"n{i}") for i in range(4)]
    config = config_of(subjects, max_bytes=9 * 2**30)
    await asyncio.gather(*(make(transport, config) for transport in transports for _ in range(2)))
    await make(transports[1], config)
    log = transports[0].durable_log(config, timeout_s=TIMEOUT_S)
    assert await log.append(f"{subjects.namespace}.log0.a", b"1") == 1


async def test_many_messages_are_read_in_order_without_a_request_for_each(bus, subjects):
    one = await log_of(await bus.connect("one"), subjects, max_bytes=2**24)
    subject, other = f"{subjects.namespace}.log0.a", f"{subjects.namespace}.log0.b"
    assert await one.all_following(subject, 1) == []
    count = BATCH_MESSAGES + 40
    numbers = [number for i in range(count) if (number := await one.append(subject, b"%d" % i)) is not None]
    await one.append(other, b"x")
    found = await one.all_following(subject, 1)
    assert found == [Logged(number, b"%d" % i) for i, number in enumerate(numbers)]
    assert await one.all_following(subject, numbers[-2]) == found[-2:]
    assert await one.all_following(subject, numbers[2], 3) == found[2:5]
    assert await one.all_following(subject, 1, BATCH_MESSAGES + 1) == found[: BATCH_MESSAGES + 1]
    assert await one.all_following(subject, numbers[-1] + 1) == []
    assert len(await one.all_following(f"{subjects.namespace}.log0.*", 1)) == count + 1
    large = [await one.append(other, bytes(2**19)) for _ in range(12)]
    assert [each.sequence for each in await one.all_following(other, large[0] or 0)] == large


async def test_of_two_writers_that_expect_the_same_last_message_one_writes(bus, subjects):
    one, two = [await log_of(await bus.connect(name), subjects, per_subject=1) for name in ("one", "two")]
    subject = f"{subjects.namespace}.log1.a"
    first = await one.append(subject, b"1", last=0)
    assert await two.append(subject, b"x", last=0) is None
    second = await two.append(subject, b"2", last=first)
    assert await one.append(subject, b"y", last=first) is None
    assert await one.last(subject) == Logged(second, b"2")
    assert await one.following(subject, 1) == Logged(second, b"2"), "only the last one is kept"


@pytest.mark.parametrize("options", [{"per_subject": 1}, {"clears": True}])
async def test_what_is_cleared_is_an_empty_message_unless_somebody_has_written_since(bus, subjects, options):
    one, two = [await log_of(await bus.connect(name), subjects, **options) for name in ("one", "two")]
    number = options.get("per_subject", 0)
    subject, other = f"{subjects.namespace}.log{number}.a", f"{subjects.namespace}.log{number}.b"
    kept = await one.append(other, b"kept")
    first = await one.append(subject, b"1")
    second = await one.append(subject, b"2")
    await two.clear(subject, last=first)
    assert await one.last(subject) == Logged(second, b"2")
    await two.clear(subject, last=second)
    assert [found.payload for found in await one.all_following(subject, 1)] == [b""]
    assert await one.append(subject, b"3", last=second) is None
    third = await one.append(subject, b"3")
    await two.clear(subject)
    assert await one.following(subject, third) == Logged(third + 1, b"")
    assert await one.all_following(other, 1) == [Logged(kept, b"kept")]


@pytest.mark.nats
async def test_an_empty_message_is_dropped_soon(nats_server, nats_connect, subjects, monkeypatch):
    monkeypatch.setattr("antiphon.shared.bus.nats_durable_log._EXPIRES", {"Nats-TTL": "1s"})
    log = await log_of(await nats_connect(nats_server, "one"), subjects, clears=True)
    subject = f"{subjects.namespace}.log0.a"
    await log.append(subject, b"1")
    await log.clear(subject)
    async with asyncio.timeout(60):
        while await log.last(subject) is not None:
            await asyncio.sleep(0.05)


@pytest.mark.nats
async def test_a_log_in_files_survives_its_server_and_one_in_memory_does_not(
    private_nats_server, nats_connect, subjects, caplog
):
    caplog.set_level("INFO")
    transport = await nats_connect(private_nats_server, "one")
    kept = await log_of(transport, subjects, storage="file", timeout_s=5.0)
    lost = await log_of(transport, subjects, per_subject=1, timeout_s=5.0)
    number = await kept.append(f"{subjects.namespace}.log0.a", b"1")
    await lost.append(f"{subjects.namespace}.log1.a", b"1")
    private_nats_server.kill()
    with pytest.raises(LogUnavailableError):
        await kept.last(f"{subjects.namespace}.log0.a")
    private_nats_server.start()
    await transport.barrier()
    await kept.open()
    told = [one.getMessage() for one in caplog.records if one.name == "antiphon.shared.bus.nats_durable_log"]
    assert [one.partition(" has ")[2][:11] for one in told[-1:]] == ["1 messages,"], "a loss can be seen in the log"
    assert await kept.last(f"{subjects.namespace}.log0.a") == Logged(number, b"1")
    with pytest.raises(LogUnavailableError, match="stream not found"):
        await lost.open()
    await make(transport, config_of(subjects, per_subject=1))
    assert await lost.last(f"{subjects.namespace}.log1.a") is None


@pytest.mark.nats
async def test_a_log_that_does_not_exist_yet_is_waited_for(nats_server, nats_connect, subjects):
    transport, config = await nats_connect(nats_server, "one"), config_of(subjects)
    opening = asyncio.create_task(transport.durable_log(config, timeout_s=60.0).open())
    with pytest.raises(LogUnavailableError):
        await transport.durable_log(config, timeout_s=0.01).open()
    assert not opening.done()
    await make(transport, config)
    await opening


@pytest.mark.nats
async def test_the_limits_of_a_log_can_be_changed_but_not_where_it_is(nats_server, nats_connect, subjects):
    transport = await nats_connect(nats_server, "one")
    for max_bytes in (2**20, 2**21):
        await make(transport, config_of(subjects, max_bytes=max_bytes))
    stream = await transport._client.jetstream().stream_info(config_of(subjects).name)
    assert stream.config.max_bytes == 2**21
    with pytest.raises(ServiceError, match="storage"):
        await make(transport, config_of(subjects, storage="file"))


@pytest.mark.nats
async def test_what_somebody_else_added_to_a_log_is_taken_away(nats_server, nats_connect, subjects):
    transport, config = await nats_connect(nats_server, "one"), config_of(subjects)
    await make(transport, config)
    context = transport._client.jetstream()
    found = (await context.stream_info(config.name)).config
    space = subjects.namespace
    found.subjects, found.republish = [config.subject, f"{space}.x"], RePublish(src=config.subject, dest=f"{space}.y")
    await context.update_stream(found)
    await make(transport, config)
    found = (await context.stream_info(config.name)).config
    assert (found.subjects, found.republish) == ([config.subject], None)
