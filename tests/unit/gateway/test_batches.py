"""Batches with a client that answers as the test says: what happens at the end of a gateway, and of the window."""

import asyncio
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from antiphon.services.gateway.edge.access.call import Call, current_call, serving
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.edge.http.in_process import InProcessClient, InProcessResponse
from antiphon.services.gateway.guests.batches import runner
from antiphon.services.gateway.guests.batches.batches import Batches
from antiphon.services.gateway.guests.batches.record import BatchRecord
from antiphon.services.gateway.guests.batches.store import BatchStore
from antiphon.services.gateway.guests.files.disk import write_atomically
from antiphon.services.gateway.guests.files.store import FileStore
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits
from antiphon.shared.security.api_keys import ANONYMOUS, ApiKey

URL = "/v1/completions"


TEAM, OTHER = ApiKey(name="team", digests=(b"1",)), ApiKey(name="other", digests=(b"2",))


class Client:
    """Answers a request with its prompt; a prompt that is in `stuck` is never answered."""

    def __init__(self, *stuck: str) -> None:
        self.stuck = stuck
        self.asked: list[str] = []
        self.calls: list[Call] = []

    async def post(self, path: str, body: bytes) -> InProcessResponse:
        prompt = json.loads(body)["prompt"]
        self.asked.append(prompt)
        self.calls.append(current_call())
        if prompt in self.stuck:
            await asyncio.Event().wait()
        return InProcessResponse(200, "r", json.dumps({"said": prompt}).encode(), 0.0)


class Gateway:
    """What one gateway has of batches."""

    def __init__(self, directory: Path, client: Client, clock: Callable[[], float], *keys: ApiKey) -> None:
        self.client = client
        self.keys = ApiKeys("", keys or None)
        self.files = FileStore(str(directory), clock, clock)
        self.store = BatchStore(self.files)
        self.batches = Batches(self.store, cast(InProcessClient, client), self.keys)

    async def end(self) -> None:
        """Ends as a killed process does: the tasks stop, and the operating system releases the locks."""
        writers = [writer for run in self.batches._runs.values() for writer in (run._output, run._errors)]
        tasks = list(self.batches._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for descriptor in self.store._locks.values():
            os.close(descriptor)
        for writer in writers:
            writer.close()

    async def start(self, *prompts: str) -> str:
        writer = await self.files.create()
        for prompt in prompts:
            line = {"custom_id": prompt, "url": URL, "body": {"prompt": prompt}}
            await writer.write(json.dumps(line).encode() + b"\n")
        file = await writer.commit("in.jsonl", "batch")
        return (await self.batches.create(file.id, URL, {})).id

    async def until(self, batch_id: str, condition: Callable[[BatchRecord], bool]) -> BatchRecord:
        async with asyncio.timeout(60):
            while not condition(record := await self.batches.get(batch_id)):
                await asyncio.sleep(0.01)
            while record.is_final and batch_id in self.batches._runs:
                await asyncio.sleep(0.01)
        return record

    def lines(self, file_id: str) -> dict[str, Any]:
        found = [json.loads(line) for line in self.files.path(file_id).read_text().splitlines()]
        assert len({line["custom_id"] for line in found}) == len(found)
        return {line["custom_id"]: line for line in found}


def names(directory: Path, *suffixes: str) -> list[str]:
    """The files in a directory that end in one of the suffixes."""
    return [path.name for path in directory.iterdir() if path.name.endswith(suffixes)]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TICK_S", 0.02)


async def test_another_gateway_continues_where_one_has_ended(tmp_path: Path, clock: Clock):
    first = Gateway(tmp_path, Client("b"), clock)
    batch_id = await first.start("a", "b", "c")
    record = await first.until(batch_id, lambda record: record.completed == 2)
    part = tmp_path / f"{record.output_file_id}.anonymous.part"
    second_client = Client()
    second = Gateway(tmp_path, second_client, clock)
    assert (await second.batches.get(batch_id)).status == "in_progress"
    assert second_client.asked == []
    await first.end()
    # It ended in the middle of a line.
    append(part, b'{"custom_id": "b')
    record = await second.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.total, record.completed, record.failed) == ("completed", 3, 3, 0)
    assert set(second.lines(record.output_file_id)) == {"a", "b", "c"}
    assert second_client.asked == ["b"]
    assert not record.has_errors
    assert names(tmp_path, ".lock", ".part", ".cancel") == []


async def test_a_batch_whose_end_was_not_recorded_is_not_run_again(tmp_path: Path, clock: Clock):
    first = Gateway(tmp_path, Client(), clock)
    record = await first.until(await first.start("a", "b"), lambda record: record.is_final)
    # The process ended after the output was complete, and before the record was.
    record.status = "finalizing"
    await first.store.put(record)
    client = Client()
    second = Gateway(tmp_path, client, clock)
    record = await second.until(record.id, lambda record: record.is_final)
    assert (record.status, record.completed, client.asked) == ("completed", 2, [])
    assert set(second.lines(record.output_file_id)) == {"a", "b"}
    assert len(await second.files.all()) == 2


async def test_a_gateway_that_starts_continues_batches_unasked(tmp_path: Path, clock: Clock):
    first = Gateway(tmp_path, Client("a"), clock)
    batch_id = await first.start("a")
    await first.until(batch_id, lambda record: record.status == "in_progress")
    await first.end()
    second = Gateway(tmp_path, Client(), clock)
    await second.batches.continue_all()
    async with asyncio.timeout(60):
        while not (await second.store.get(batch_id)).is_final:
            await asyncio.sleep(0.01)
    missing = tmp_path / "missing"
    await Gateway(missing, Client(), clock).batches.continue_all()
    assert "missing" not in names(tmp_path, "")


async def test_unanswered_requests_expire_with_the_window(tmp_path: Path, clock: Clock):
    gateway = Gateway(tmp_path, Client("b", "c"), clock)
    batch_id = await gateway.start("a", "b", "c")
    await gateway.until(batch_id, lambda record: record.completed == 1)
    clock.now += limits.BATCH_WINDOW_S
    record = await gateway.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.completed, record.failed) == ("expired", 1, 2)
    assert set(gateway.lines(record.output_file_id)) == {"a"}
    expired = gateway.lines(record.error_file_id)
    assert {name: line["error"]["code"] for name, line in expired.items()} == dict.fromkeys("bc", "batch_expired")
    shown = record.to_object()
    assert shown["expired_at"] >= shown["expires_at"]


async def test_a_batch_whose_output_cannot_be_written_fails(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "BATCH_OUTPUT_BYTES_MAX", 10)
    gateway = Gateway(tmp_path, Client(), clock)
    record = await gateway.until(await gateway.start("a"), lambda record: record.is_final)
    assert (record.status, record.errors[0].code) == ("failed", "request_too_large")
    assert (record.completed, record.has_output) == (0, False)
    assert names(tmp_path, ".part", ".lock") == []


async def test_a_batch_runs_with_the_key_that_made_it_whoever_asks(tmp_path: Path, clock: Clock):
    first = Gateway(tmp_path, Client("a"), clock, TEAM, OTHER)
    with serving(Call(key=TEAM, timeout="1")):
        batch_id = await first.start("a")
        record = await first.until(batch_id, lambda record: record.status == "in_progress")
    await first.end()
    client = Client()
    second = Gateway(tmp_path, client, clock, TEAM, OTHER)
    with serving(Call(key=OTHER, timeout="1")):
        assert await second.batches.all() == []
        for unknown in (second.batches.get(batch_id), second.batches.cancel(batch_id)):
            with pytest.raises(ServiceError, match="No such batch"):
                await unknown
        with pytest.raises(ServiceError, match="No such file"):
            await second.files.get(record.input_file_id)
    assert client.asked == []
    with serving(Call(key=TEAM, timeout="1")):
        record = await second.until(batch_id, lambda record: record.is_final)
        assert (await second.files.get(record.output_file_id)).owner == "team"
    assert client.calls == [Call(key=TEAM, in_batch=True)]
    assert "team" not in json.dumps(record.to_object())


@pytest.mark.parametrize(
    ("owner", "keys", "told"),
    [
        (TEAM, (OTHER,), "with the API key 'team', which does not exist any more"),
        (ANONYMOUS, (OTHER,), "without an API key, and the server needs one now"),
        (TEAM, (ApiKey(name="team", digests=(b"1",), scopes=frozenset({"admin"})),), "lacks the scope 'inference'"),
    ],
)
async def test_a_batch_whose_key_is_gone_fails_and_keeps_its_answers(
    tmp_path: Path, clock: Clock, owner: ApiKey, keys: tuple[ApiKey, ...], told: str
):
    first = Gateway(tmp_path, Client("b"), clock, *([] if owner is ANONYMOUS else [owner]))
    with serving(Call(key=owner)):
        batch_id = await first.start("a", "b")
        await first.until(batch_id, lambda record: record.completed == 1)
    await first.end()
    client = Client()
    second = Gateway(tmp_path, client, clock, *keys)
    await second.batches.continue_all()
    record = await second.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.completed, record.failed, client.asked) == ("failed", 1, 0, [])
    assert told in record.errors[0].message
    assert set(second.lines(record.output_file_id)) == {"a"}
    assert names(tmp_path, ".lock", ".part", ".cancel") == []


async def test_without_keys_a_batch_of_any_key_runs(tmp_path: Path, clock: Clock):
    first = Gateway(tmp_path, Client("a"), clock, TEAM)
    with serving(Call(key=TEAM)):
        batch_id = await first.start("a")
        await first.until(batch_id, lambda record: record.status == "in_progress")
    await first.end()
    client = Client()
    record = await Gateway(tmp_path, client, clock).until(batch_id, lambda record: record.is_final)
    assert (record.status, client.calls) == ("completed", [Call(in_batch=True)])


async def test_the_answers_of_a_failed_batch_are_kept(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "BATCH_CONCURRENCY", 1)
    monkeypatch.setattr(limits, "BATCH_OUTPUT_BYTES_MAX", 250)
    gateway = Gateway(tmp_path, Client(), clock)
    record = await gateway.until(await gateway.start("a", "b", "c"), lambda record: record.is_final)
    assert (record.status, record.errors[0].code) == ("failed", "request_too_large")
    assert (record.completed, record.has_output, record.has_errors) == (1, True, False)
    assert set(gateway.lines(record.output_file_id)) == {"a"}


async def test_a_batch_whose_end_cannot_be_recorded_is_released_and_continued(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    gateway = Gateway(tmp_path, Client(), clock)
    put = gateway.store.put

    async def full(record: BatchRecord) -> None:
        if record.status in ("finalizing", "failed"):
            raise OSError("no space left")
        await put(record)

    monkeypatch.setattr(gateway.store, "put", full)
    batch_id = await gateway.start("a")
    async with asyncio.timeout(60):
        while batch_id in gateway.batches._runs:
            await asyncio.sleep(0.01)
    assert "stops until somebody asks for it: no space left" in caplog.text
    assert (gateway.store._locks, names(tmp_path, ".lock")) == ({}, [])
    monkeypatch.undo()
    record = await gateway.until(batch_id, lambda record: record.is_final)
    assert (record.status, set(gateway.lines(record.output_file_id))) == ("completed", {"a"})


async def test_a_cancellation_outlives_the_gateway_that_was_asked(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    first = Gateway(tmp_path, Client("a"), clock)
    batch_id = await first.start("a")
    await first.until(batch_id, lambda record: record.status == "in_progress")
    monkeypatch.setattr(runner, "TICK_S", 100)
    await asyncio.sleep(0.1)
    await first.batches.cancel(batch_id)
    await first.end()
    client = Client()
    second = Gateway(tmp_path, client, clock)
    record = await second.until(batch_id, lambda record: record.is_final)
    assert (record.status, client.asked) == ("cancelled", [])
    assert names(tmp_path, ".lock", ".part", ".cancel") == []


async def test_a_batch_that_fails_and_is_cancelled_cancels_a_request_only_once(tmp_path: Path, clock: Clock):
    """A second cancellation would interrupt a write that the first one lets end."""
    cancelled: list[str] = []

    class Failing(Client):
        async def post(self, path: str, body: bytes) -> InProcessResponse:
            if json.loads(body)["prompt"] == "a":
                while "b" not in self.asked:
                    await asyncio.sleep(0.01)
                raise RuntimeError("a bug")
            try:
                return await super().post(path, body)
            except asyncio.CancelledError:
                cancelled.append("once")
                await gateway.batches.cancel(batch_id)
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    cancelled.append("twice")
                raise

    gateway = Gateway(tmp_path, Failing("b"), clock)
    batch_id = await gateway.start("b", "a")
    record = await gateway.until(batch_id, lambda record: record.is_final)
    assert (record.status, cancelled) == ("failed", ["once"])


async def test_a_lock_whose_file_its_holder_has_removed_is_not_taken(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    gateway, other = Gateway(tmp_path, Client(), clock), Gateway(tmp_path, Client(), clock)
    batch_id = "batch_" + "x" * 22
    assert await gateway.store.take(batch_id)
    lock = tmp_path / f"{batch_id}.lock"
    flock = fcntl.flock

    def removed_meanwhile(descriptor: int, operation: int) -> None:
        lock.unlink()
        os.close(gateway.store._locks.pop(batch_id))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    assert not await other.store.take(batch_id)
    monkeypatch.undo()
    assert not lock.exists()
    assert await other.store.take(batch_id)


async def test_a_batch_without_its_input_fails(tmp_path: Path, clock: Clock):
    first = Gateway(tmp_path, Client("a"), clock)
    batch_id = await first.start("a")
    record = await first.until(batch_id, lambda record: record.status == "in_progress")
    await first.end()
    second = Gateway(tmp_path, Client(), clock)
    await second.files.delete(record.input_file_id)
    record = await second.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.errors[0].code) == ("failed", "invalid_input_file")


async def test_a_damaged_record_is_passed_over_and_logged(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
):
    gateway = Gateway(tmp_path, Client(), clock)
    record = await gateway.until(await gateway.start("a"), lambda record: record.is_final)
    whole = tmp_path / f"{record.id}.json"
    for damaged in (b"", whole.read_bytes()[:-9], b'{"id": 3}', b"\xff"):
        for name in ("batch_" + "x" * 22, "file-" + "x" * 22):
            (tmp_path / f"{name}.json").write_bytes(damaged)
        await gateway.batches.continue_all()
        assert [one.id for one in await gateway.batches.all()] == [record.id]
        assert len(await gateway.files.all()) == 2
        with pytest.raises(ServiceError, match="No such batch"):
            await gateway.batches.get("batch_" + "x" * 22)
        with pytest.raises(ServiceError, match="No such file"):
            await gateway.files.get("file-" + "x" * 22)
    assert caplog.text.count("is damaged and is passed over") == 2, "once for each file, however often it is looked at"


def test_a_record_is_on_the_disk_before_it_replaces_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "record"
    write_atomically(path, b"old")

    def broken(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == 3
        raise OSError("a broken disk")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="broken"):
        write_atomically(path, b"new")
    assert names(tmp_path, "") == ["record"]
    assert path.read_bytes() == b"old"


async def test_only_the_user_of_the_gateway_can_read_what_is_stored(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    # The batch does not see by itself that it is cancelled: it would end while its files are looked at.
    monkeypatch.setattr(runner, "TICK_S", 3600)
    directory = tmp_path / "files"
    gateway = Gateway(directory, Client("b"), clock)
    batch_id = await gateway.start("a", "b")
    await gateway.until(batch_id, lambda record: record.completed == 1)
    await gateway.store.ask_to_cancel(batch_id)
    # A record that is being written has another name for a moment.
    expected = {"", ".json", ".part", ".lock", ".cancel"}
    paths: list[Path] = []
    while {path.suffix for path in paths} != expected:
        await asyncio.sleep(0.01)
        paths = list(directory.iterdir())
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    await gateway.batches.cancel(batch_id)
    await gateway.until(batch_id, lambda record: record.is_final)


async def test_files_that_are_being_written_count_and_a_batch_needs_room(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    gateway = Gateway(tmp_path, Client(), clock)
    await gateway.until(await gateway.start("a"), lambda record: record.is_final)
    first = next(one for one in await gateway.files.all() if one.purpose == "batch")
    monkeypatch.setattr(limits, "FILES_MAX", 3)
    part = await gateway.files.create(10)
    for full in (gateway.files.create(), gateway.batches.create(first.id, URL, {})):
        with pytest.raises(ServiceError, match="no room"):
            await full
    monkeypatch.undo()
    monkeypatch.setattr(limits, "FILES_BYTES_MAX", sum(one.bytes for one in await gateway.files.all()) + 10)
    for full in (gateway.files.create(1), gateway.batches.create(first.id, URL, {})):
        with pytest.raises(ServiceError, match="no room"):
            await full
    await part.abort()
    await (await gateway.files.create(10)).abort()
    assert len(await gateway.batches.all()) == 1


async def test_the_oldest_batches_that_have_ended_make_room_for_new_ones(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "BATCHES_MAX", 2)
    monkeypatch.setattr(limits, "BATCHES_UNFINISHED_MAX", 2)
    gateway = Gateway(tmp_path, Client("stuck"), clock)
    running = await gateway.start("stuck")
    ids: list[str] = []
    for _ in range(3):
        clock.now += 1
        ids.append(await gateway.start("a"))
        await gateway.until(ids[-1], lambda record: record.is_final)
    assert {one.id for one in await gateway.batches.all()} == {running, ids[-1]}
    await gateway.start("stuck")
    with pytest.raises(ServiceError, match="Too many batches"):
        await gateway.start("stuck")
    await gateway.end()


async def test_files_and_batches_are_forgotten_after_a_month(tmp_path: Path, clock: Clock):
    gateway = Gateway(tmp_path, Client(), clock)
    await gateway.until(await gateway.start("a"), lambda record: record.is_final)
    assert len(await gateway.files.all()) == 2
    clock.now += limits.FILE_TTL_S
    assert await gateway.files.all() == []
    assert await gateway.batches.all() == []
    assert names(tmp_path, "") == []


async def test_many_requests_run_at_once_but_not_all(tmp_path: Path, clock: Clock):
    prompts = [f"p{number}" for number in range(3 * limits.BATCH_CONCURRENCY)]
    client = Client(*prompts)
    gateway = Gateway(tmp_path, client, clock)
    batch_id = await gateway.start(*prompts)
    while len(client.asked) < limits.BATCH_CONCURRENCY:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert len(client.asked) == limits.BATCH_CONCURRENCY
    await gateway.batches.cancel(batch_id)
    record = await gateway.until(batch_id, lambda record: record.is_final)
    assert (record.status, record.has_output, record.has_errors) == ("cancelled", False, False)
