"""What every key-value store promises (`shared/bus/key_value.py`), on a real NATS server and within the process."""

import asyncio

import pytest

from antiphon.shared.bus.key_value import BucketConfig, Entry, StoreUnavailableError
from antiphon.shared.errors import ServiceError
from antiphon.shared.subjects import bucket_name

TIMEOUT_S = 60.0
"""For operations that are answered."""


def config_of(subjects, ttl_s: float = 60.0) -> BucketConfig:
    return BucketConfig(bucket_name(subjects.namespace, "test"), ttl_s)


async def store_of(transport, subjects, ttl_s: float = 60.0, timeout_s: float = TIMEOUT_S):
    """A store that exists."""
    await transport.make_store(config_of(subjects, ttl_s), replicas=1, timeout_s=60.0)
    return transport.key_value_store(config_of(subjects, ttl_s), timeout_s=timeout_s)


async def test_a_key_that_was_never_written_has_no_entry(bus, subjects):
    store = await store_of(await bus.connect("one"), subjects)
    assert await store.get("a") is None


async def test_what_one_writes_another_reads(bus, subjects):
    one, two = [await store_of(await bus.connect(name), subjects) for name in ("one", "two")]
    revision = await one.replace("limits.team-a", b"\x00value", 0)
    assert revision
    assert await two.get("limits.team-a") == Entry(b"\x00value", revision)
    assert await two.get("limits.team-b") is None


async def test_only_the_writer_with_the_current_revision_writes(bus, subjects):
    one, two = [await store_of(await bus.connect(name), subjects) for name in ("one", "two")]
    first = await one.replace("a", b"1", 0)
    assert await two.replace("a", b"2", 0) is None
    second = await two.replace("a", b"2", first)
    assert second not in (None, first)
    assert await one.replace("a", b"3", first) is None
    assert await one.get("a") == Entry(b"2", second)


async def test_of_many_writers_at_once_each_addition_counts(bus, subjects):
    stores = [await store_of(await bus.connect(f"w{number}"), subjects) for number in range(4)]

    async def add(store) -> None:
        for _ in range(10):
            while True:
                entry = await store.get("sum")
                value, revision = (int(entry.value), entry.revision) if entry else (0, 0)
                if await store.replace("sum", str(value + 1).encode(), revision) is not None:
                    break

    await asyncio.gather(*map(add, stores))
    assert int((await stores[0].get("sum")).value) == 40


async def test_an_entry_that_nobody_writes_disappears_and_can_be_written_anew(bus, subjects):
    store = await store_of(await bus.connect("one"), subjects, ttl_s=1.0)
    await store.replace("a", b"1", 0)
    async with asyncio.timeout(60):
        while await store.get("a") is not None:
            await asyncio.sleep(0.1)
    assert await store.replace("a", b"2", 0)


@pytest.mark.nats
async def test_a_store_comes_back_with_its_server(private_nats_server, nats_connect, subjects):
    transport = await nats_connect(private_nats_server, "one")
    store = await store_of(transport, subjects)
    await store.replace("a", b"1", 0)
    brief = await store_of(transport, subjects, timeout_s=0.3)
    private_nats_server.kill()
    with pytest.raises(StoreUnavailableError):
        await brief.get("a")
    private_nats_server.start()
    await transport.barrier()
    with pytest.raises(StoreUnavailableError):
        await brief.get("a")
    await store_of(transport, subjects)
    async with asyncio.timeout(60):
        while True:
            try:
                assert await store.get("a") is None, "it was in memory"
                break
            except StoreUnavailableError:
                await asyncio.sleep(0.1)
    assert await store.replace("a", b"2", 0)


@pytest.mark.nats
async def test_a_server_without_jetstream_or_without_permission_has_no_store(
    private_nats_server, nats_connect, subjects
):
    server = private_nats_server
    own = f'"{subjects.namespace}.>"'
    only_own = f", permissions: {{ publish: {own}, subscribe: {own} }}"
    for change in ({"jetstream": False}, {"permissions": only_own}):
        server.kill()
        for name, value in change.items():
            setattr(server, name, value)
        server.start()
        transport = await nats_connect(server, f"client-{next(iter(change))}")
        store = transport.key_value_store(config_of(subjects), timeout_s=0.3)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                await store.get("a")
        with pytest.raises(ServiceError, match="cannot be made"):
            await transport.make_store(config_of(subjects), replicas=1, timeout_s=0.3)
        await transport.barrier()
        server.jetstream = True


async def test_without_a_store_an_operation_fails_and_nothing_else_does(memory_connect, subjects):
    transport = await memory_connect("one")
    transport.bus.has_store = False
    with pytest.raises(StoreUnavailableError):
        await (await store_of(transport, subjects, timeout_s=0.01)).get("a")
