"""Batches whose gateways die, the share of each key in unfinished batches, and the turns of a batch's work."""

import asyncio
import errno
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.services.gateway.edge.access.call import Call, serving
from antiphon.services.gateway.guests.batches import runner
from antiphon.services.gateway.guests.batches.places import Places
from antiphon.services.gateway.guests.batches.store import BatchStore
from antiphon.services.gateway.guests.files import disk
from antiphon.services.gateway.guests.files.store import FileStore
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits
from antiphon.shared.limits import STARTS_MAX
from antiphon.shared.security.api_keys import ApiKey
from antiphon.supervision.fleet import Backoff
from tests.unit.gateway.test_batches import OTHER, TEAM, Client, Clock, Gateway, append, names

THIRD = ApiKey(name="third", digests=(b"3",))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TICK_S", 0.02)


async def die(gateway: Gateway, batch_id: str) -> None:
    """Ends a gateway as SIGKILL does: the lock is free, but its file is still there."""
    await gateway.end()
    (gateway.store.files.directory / f"{batch_id}.lock").touch()


async def got_further(gateway: Gateway, batch_id: str, completed: int) -> None:
    """Returns when a batch has so many answers, and its state on the disk says that it got further."""
    await gateway.until(batch_id, lambda record: record.completed == completed)
    while (await gateway.store.get(batch_id)).starts:
        await asyncio.sleep(0.01)


# --- deaths ---


async def test_a_batch_that_ends_its_gateways_fails_and_keeps_its_answers(tmp_path: Path, clock: Clock):
    gateway = Gateway(tmp_path, Client("b"), clock)
    batch_id = await gateway.start("a", "b")
    await got_further(gateway, batch_id, 1)
    for starts in range(STARTS_MAX):
        await die(gateway, batch_id)
        gateway = Gateway(tmp_path, client := Client("b"), clock)
        record = await gateway.until(batch_id, lambda _, client=client: client.asked == ["b"])
        assert (record.status, record.starts) == ("in_progress", starts + 1)
    await die(gateway, batch_id)
    gateway = Gateway(tmp_path, client := Client(), clock)
    record = await gateway.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.completed, client.asked) == ("failed", 1, [])
    assert record.errors[0].code == "gateway_failure"
    assert "ended again and again" in record.errors[0].message
    assert set(gateway.lines(record.output_file_id)) == {"a"}
    assert names(tmp_path, ".lock", ".part", ".cancel") == []


async def test_a_start_is_on_the_disk_before_the_work_begins(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    first = Gateway(tmp_path, Client("a"), clock)
    batch_id = await first.start("a")
    await die(first, batch_id)
    seen: list[int] = []

    async def look(run: runner.BatchRun) -> bool:
        seen.append((await second.store.get(batch_id)).starts)
        return False

    second = Gateway(tmp_path, Client(), clock)
    monkeypatch.setattr(runner.BatchRun, "_validate", look)
    monkeypatch.setattr(runner.BatchRun, "_find_answered", look)
    await second.until(batch_id, lambda _: bool(seen))
    assert seen[0] == 2
    await second.end()


async def test_a_batch_that_gets_further_survives_any_number_of_deaths(tmp_path: Path, clock: Clock):
    prompts = [f"p{number}" for number in range(4 * STARTS_MAX)]
    gateway = Gateway(tmp_path, Client(*prompts[1:]), clock)
    batch_id = await gateway.start(*prompts)
    for number in range(1, len(prompts)):
        await got_further(gateway, batch_id, number)
        await die(gateway, batch_id)
        gateway = Gateway(tmp_path, Client(*prompts[number + 1 :]), clock)
    record = await gateway.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.completed) == ("completed", len(prompts))


async def test_a_gateway_that_ends_in_order_does_not_count(tmp_path: Path, clock: Clock):
    gateway = Gateway(tmp_path, Client("a"), clock)
    batch_id = await gateway.start("a")
    for _ in range(2 * STARTS_MAX):
        await gateway.until(batch_id, lambda _, gateway=gateway: bool(gateway.client.asked))
        await gateway.end()
        gateway = Gateway(tmp_path, Client("a"), clock)
    await gateway.end()
    gateway = Gateway(tmp_path, Client(), clock)
    record = await gateway.until(batch_id, lambda record: record.is_final)
    assert record.status == "completed"


async def test_a_gateway_that_dies_while_it_keeps_the_answers_does_not_keep_them_again(tmp_path: Path, clock: Clock):
    first = Gateway(tmp_path, Client("b"), clock)
    batch_id = await first.start("a", "b")
    record = await first.until(batch_id, lambda record: record.completed == 1)
    await first.end()
    record.starts = STARTS_MAX + 1
    await first.store.put(record)
    (tmp_path / f"{batch_id}.lock").touch()
    second = Gateway(tmp_path, Client(), clock)
    record = await second.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.has_output) == ("failed", False)


def test_the_gateways_of_a_launcher_outlive_such_a_batch():
    """With one gateway, it dies at each start, and once more if keeping the answers ends it."""
    backoff = Backoff()
    assert all(backoff.crashed(0.0) is not None for _ in range(STARTS_MAX + 1))


HOLDER = """
import asyncio, sys
from antiphon.services.gateway.guests.batches.store import BatchStore
from antiphon.services.gateway.guests.files.store import FileStore
store = BatchStore(FileStore(sys.argv[1]))
print(asyncio.run(store.take(sys.argv[2])), flush=True)
writer = store.files.writer("file-" + "x" * 22, "team")
asyncio.run(writer.write(b"whole\\n"))
print("written", flush=True)
input()
"""


async def test_the_lock_of_a_killed_process_is_known_to_be_left_behind(tmp_path: Path):
    batch_id = "batch_" + "x" * 22
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(tmp_path), batch_id, stdin=PIPE, stdout=PIPE
    )
    assert holder.stdout is not None
    assert [(await holder.stdout.readline()).strip() for _ in range(2)] == [b"in order", b"written"]
    store = BatchStore(FileStore(str(tmp_path)))
    assert await store.take(batch_id) == ""
    holder.kill()
    await holder.communicate()
    # What it had taken on the disk for further answers is there, as zeros.
    part = tmp_path / f"file-{'x' * 22}.team.part"
    assert part.read_bytes().rstrip(b"\0") == b"whole\n"
    assert part.stat().st_size > limits.FILE_STEP_BYTES
    assert await store.take(batch_id) == "left behind"
    os.close(store._locks.pop(batch_id))


async def test_a_damaged_line_is_removed_and_its_request_runs_again(tmp_path: Path, clock: Clock):
    first = Gateway(tmp_path, Client("c"), clock)
    batch_id = await first.start("a", "b", "c")
    record = await first.until(batch_id, lambda record: record.completed == 2)
    await die(first, batch_id)
    part = tmp_path / f"{record.output_file_id}.anonymous.part"
    one, two = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(one[:30] + b"\xff\x00\n" + two + two)
    append(part, b"\0" * 5000)
    client = Client()
    second = Gateway(tmp_path, client, clock)
    record = await second.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.completed, record.failed) == ("completed", 3, 0)
    assert set(second.lines(record.output_file_id)) == {"a", "b", "c"}
    assert len(client.asked) == 2


@pytest.mark.parametrize("function", ["fsync", "pwrite"])
async def test_a_full_disk_stops_a_batch_and_does_not_fail_it(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, function: str
):
    first = Gateway(tmp_path, Client("a", "b"), clock)
    batch_id = await first.start("a", "b")
    await first.until(batch_id, lambda record: record.status == "in_progress")
    await first.end()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    gateway = Gateway(tmp_path, Client(), clock)
    monkeypatch.setattr(os, function, full)
    assert (await gateway.batches.get(batch_id)).status == "in_progress"
    while batch_id in gateway.batches._runs:
        await asyncio.sleep(0.01)
    assert (gateway.store._locks, names(tmp_path, ".lock")) == ({}, [])
    monkeypatch.undo()
    record = await gateway.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.completed) == ("completed", 2)


# --- shares ---


async def test_a_key_leaves_others_places_for_batches(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "BATCHES_UNFINISHED_MAX", 8)
    gateways = [Gateway(tmp_path, Client("a"), clock, TEAM, OTHER, THIRD) for _ in range(2)]
    with serving(Call(key=TEAM)):
        for number in range(4):
            await gateways[number % 2].start("a")
        for gateway in gateways:
            with pytest.raises(ServiceError, match="Too many batches") as refused:
                await gateway.start("a")
            assert refused.value.code == "server_is_overloaded"
    with serving(Call(key=OTHER)):
        for gateway in gateways:
            await gateway.start("a")
        with pytest.raises(ServiceError, match="Too many batches"):
            await gateways[0].start("a")
    with serving(Call(key=THIRD)):
        await gateways[1].start("a")
    for gateway in gateways:
        await gateway.end()


async def test_batches_created_at_once_do_not_take_the_same_place(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "BATCHES_UNFINISHED_MAX", 4)
    gateway = Gateway(tmp_path, Client("a"), clock, TEAM)
    with serving(Call(key=TEAM)):
        results = await asyncio.gather(*(gateway.start("a") for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(one, str) for one in results) == 2
    await gateway.end()


async def test_the_key_with_most_ended_batches_loses_its_oldest_first(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "BATCHES_MAX", 4)
    gateway = Gateway(tmp_path, Client(), clock, TEAM, OTHER)
    made: dict[str, list[str]] = {"team": [], "other": []}
    for key in (TEAM, OTHER, OTHER, OTHER, OTHER, OTHER):
        clock.now += 1
        with serving(Call(key=key)):
            made[key.name].append(batch_id := await gateway.start("a"))
            await gateway.until(batch_id, lambda record: record.is_final)
    assert {one.id for one in await gateway.store.all()} == {*made["team"], *made["other"][-3:]}


# --- turns ---


async def test_long_work_gives_the_event_loop_its_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "PIECE_S", 0.0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    await disk.in_pieces(iter([None] * 100))
    other.cancel()
    assert turns >= 100


@example(sizes=[limits.BATCH_LINE_BYTES_MAX] * 60, cancelled=set())
@given(sizes=st.lists(st.integers(1, limits.BATCH_LINE_BYTES_MAX), max_size=60), cancelled=st.sets(st.integers(0, 59)))
async def test_the_bodies_of_running_requests_are_bounded_and_each_gets_its_turn(sizes: list[int], cancelled: set[int]):
    places, running, peak = Places(), [0, 0], [0, 0]

    async def send(size: int) -> None:
        async with places.taken(size):
            for index, amount in enumerate((1, size)):
                running[index] += amount
                peak[index] = max(peak[index], running[index])
            try:
                await asyncio.sleep(0)
            finally:
                running[0], running[1] = running[0] - 1, running[1] - size

    tasks = [asyncio.create_task(send(size)) for size in sizes]
    await asyncio.sleep(0)
    for number in cancelled & set(range(len(tasks))):
        tasks[number].cancel()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(one is None or isinstance(one, asyncio.CancelledError) for one in results)
    assert peak[0] <= limits.BATCH_CONCURRENCY
    assert peak[1] <= limits.BATCH_CONCURRENCY * limits.BATCH_PLACE_BYTES
    async with places.taken(limits.BATCH_CONCURRENCY * limits.BATCH_PLACE_BYTES):
        pass  # All places are free again.
