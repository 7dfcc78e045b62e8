"""The process that makes the stores of a deployment, for those who start each service separately."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats import errors

from antiphon.shared.bus.durable_log import LogConfig, LogUnavailableError, Storage
from antiphon.shared.deployment.stores import stores, stream_records
from antiphon.shared.security.bus_permissions import BUCKETS, LOGS
from antiphon.shared.subjects import Subjects, bucket_name
from tests.conftest import Connect, NatsServer

pytestmark = pytest.mark.nats
START_S = 60.0


@contextlib.asynccontextmanager
async def setup(server: NatsServer, namespace: str, *flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "antiphon", "service", "setup", f"--nats={server.url}",
        f"--nats-credentials={server.credentials}", f"--namespace={namespace}", *flags, stderr=DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def made(transport: Any, subjects: Subjects, storage: Storage) -> None:
    """Returns when all stores are there, each where it should be."""
    context = transport._client.jetstream()
    async with asyncio.timeout(START_S):
        for config in stores(subjects, storage):
            name = config.name if isinstance(config, LogConfig) else f"KV_{config.name}"
            found = None
            while found is None:
                try:
                    found = (await context.stream_info(name)).config
                except errors.Error:
                    await asyncio.sleep(0.05)
            assert found.storage == (storage if isinstance(config, LogConfig) else "memory")


async def test_it_makes_all_stores_and_makes_them_again_when_the_bus_has_lost_them(
    private_nats_server: NatsServer, nats_connect: Connect, subjects: Subjects, namespace: str
):
    transport = await nats_connect(private_nats_server, "one")
    async with setup(private_nats_server, namespace) as process:
        await made(transport, subjects, "memory")
        private_nats_server.kill()
        private_nats_server.start()
        await transport.barrier()
        await made(transport, subjects, "memory")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), START_S) == 0


async def test_where_the_logs_are_is_told(nats_server: NatsServer, nats_connect: Connect, namespace: str):
    transport, kept = await nats_connect(nats_server, "one"), Subjects(f"{namespace}-kept")
    async with setup(nats_server, kept.namespace, "--stream-store=file"):
        await made(transport, kept, "file")
    none = Subjects(f"{namespace}-none")
    async with setup(nats_server, none.namespace, "--stream-store=off"):
        store = transport.key_value_store(stores(none, None)[0], timeout_s=START_S)
        assert await store.get("a") is None
        with pytest.raises(LogUnavailableError, match="not found"):
            await transport.durable_log(stream_records(none, "memory"), timeout_s=0.01).open()


async def test_who_may_not_make_stores_and_what_cannot_be_are_told_by_exit_code_78(
    nats_server: NatsServer, namespace: str
):
    for flags in (["--bus-replicas=9"], [f"--nats-credentials={nats_server.directory / 'none'}"]):
        async with setup(nats_server, namespace, *flags) as process:
            assert await asyncio.wait_for(process.wait(), START_S) == 78


def test_the_stores_are_those_of_the_table_of_permissions():
    names = {each.name for each in stores(Subjects(), "memory")}
    assert names == {bucket_name("antiphon", name) for name in (*BUCKETS, *LOGS)}
