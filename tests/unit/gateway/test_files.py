"""The store of files: what is left behind when something fails, the share of each key, a full disk, a wrong clock."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.edge.access.call import Call, serving
from antiphon.services.gateway.guests.files import directory
from antiphon.services.gateway.guests.files.clock import WallClock
from antiphon.services.gateway.guests.files.store import FileStore
from antiphon.services.gateway.guests.files.writer import FileWriter
from antiphon.shared.errors import ServiceError
from antiphon.shared.files import limits
from antiphon.shared.security.api_keys import ApiKey

KEYS = {name: ApiKey(name=name, digests=(name.encode(),)) for name in ("alice", "bob", "carol")}


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


async def upload(store: FileStore, key: str, data: bytes, announced: bool = True) -> str:
    with serving(Call(key=KEYS[key])):
        writer = await store.create(len(data) if announced else 0)
        try:
            await writer.write(data)
            return (await writer.commit("a", "batch")).id
        except BaseException:
            await writer.abort()
            raise


async def refused(work: Any) -> str:
    with pytest.raises(ServiceError) as found:
        await work
    return found.value.code


def fails(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    """Makes a function of `os` fail."""

    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, failing)


# --- failures ---


@pytest.mark.parametrize("announced", [True, False])
async def test_a_file_has_the_bytes_that_were_written(tmp_path: Path, announced: bool):
    store = FileStore(str(tmp_path))
    for data in (b"", b"x" * 10, b"x" * (limits.FILE_STEP_BYTES + 10)):
        file_id = await upload(store, "alice", data, announced)
        assert store.path(file_id).read_bytes() == data
    with serving(Call(key=KEYS["alice"])):
        writer = await store.create(1000)
        await writer.write(b"less than announced")
        assert (await writer.commit("a", "batch")).bytes == 19
        assert store.path(writer.id).stat().st_size == 19


@pytest.mark.parametrize("broken", ["fsync", "pwrite", "posix_fallocate"])
async def test_a_file_that_cannot_be_completed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
):
    store = FileStore(str(tmp_path))
    fails(monkeypatch, broken, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        await upload(store, "alice", b"x")
    assert names(tmp_path) == []
    monkeypatch.undo()
    await upload(store, "alice", b"x")


async def test_an_output_file_that_cannot_be_described_keeps_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = FileStore(str(tmp_path))
    writer = store.writer("file-" + "x" * 22, "alice")
    await writer.write(b"answers")
    fails(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        await writer.commit("a", "batch_output")
    monkeypatch.undo()
    assert names(tmp_path) == [f"{writer.id}.alice.part"]
    assert (await writer.commit("a", "batch_output")).bytes == 7


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("full", ["fsync", "pwrite", "posix_fallocate"])
async def test_a_full_disk_is_an_overloaded_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, number: int
):
    store = FileStore(str(tmp_path))
    fails(monkeypatch, full, number)
    assert await refused(upload(store, "alice", b"x")) == "server_is_overloaded"
    assert names(tmp_path) == []


async def test_a_write_that_fails_half_way_leaves_no_part_of_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, pwrite = FileStore(str(tmp_path)), os.pwrite
    writer = store.writer("file-" + "x" * 22, "alice")
    await writer.write(b"one\n")

    def half(file: int, data: Any, at: int) -> int:
        if len(data) < 4:
            raise OSError(errno.ENOSPC, "full")
        return pwrite(file, data[:2], at)

    monkeypatch.setattr(os, "pwrite", half)
    assert await refused(writer.write(b"two\n")) == "server_is_overloaded"
    monkeypatch.undo()
    await writer.write(b"three\n")
    await writer.commit("a", "batch_output")
    assert store.path(writer.id).read_bytes() == b"one\nthree\n"


async def test_data_of_dead_processes_counts_until_it_is_removed(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "FILES_MAX", 3)
    store = FileStore(str(tmp_path), clock, clock)
    left = [tmp_path / f"file-{'x' * 22}", tmp_path / f"file-{'y' * 22}.alice.part", tmp_path / f"file-{'z' * 22}.part"]
    for path in left:
        path.write_bytes(b"data")
        os.utime(path, (clock.now, clock.now))
    assert await refused(upload(store, "bob", b"x")) == "request_too_large"
    clock.now += limits.FILE_ABANDONED_S - 1
    assert await refused(upload(store, "bob", b"x")) == "request_too_large"
    clock.now += 1
    file_id = await upload(store, "bob", b"x")
    assert names(tmp_path) == [file_id, f"{file_id}.json"]


# --- shares ---


async def test_a_key_leaves_room_for_the_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "FILES_MAX", 12)
    stores = [FileStore(str(tmp_path)), FileStore(str(tmp_path))]  # two gateways
    for number in range(6):
        await upload(stores[number % 2], "bob", b"x")
    for store in stores:
        assert await refused(upload(store, "bob", b"x")) == "request_too_large"
    for number in range(3):
        await upload(stores[number % 2], "alice", b"x")
    assert await refused(upload(stores[0], "alice", b"x")) == "request_too_large"
    await upload(stores[1], "carol", b"x")
    with serving(Call(key=KEYS["bob"])):
        for one in (await stores[1].all())[1:]:
            await stores[1].delete(one.id)
    await upload(stores[0], "alice", b"x")


@pytest.mark.parametrize("announced", [True, False])
async def test_files_that_are_being_written_count_for_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: bool
):
    monkeypatch.setattr(limits, "FILE_STEP_BYTES", 100)
    monkeypatch.setattr(limits, "FILES_BYTES_MAX", 4000)
    stores = [FileStore(str(tmp_path)), FileStore(str(tmp_path))]
    writers: list[FileWriter] = []
    with serving(Call(key=KEYS["bob"])):
        for store in stores:
            writers.append(await store.create(900 if announced else 0))
            await writers[-1].write(b"x" * 900)
        other = await stores[0].create()
        assert await refused(other.write(b"x" * 300)) == "request_too_large"
        await other.abort()
    await upload(stores[1], "alice", b"x" * 900)
    with serving(Call(key=KEYS["bob"])):
        for writer in writers:
            await writer.commit("a", "batch")


async def test_concurrent_uploads_do_not_take_the_same_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "FILES_BYTES_MAX", 1000)
    store = FileStore(str(tmp_path))
    first = await store.create(600)
    assert await refused(store.create(600)) == "request_too_large"
    await first.abort()
    await (await store.create(600)).abort()


async def test_a_key_has_at_most_half_of_a_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "FILES_FREE_BYTES", 0)
    store = FileStore(str(tmp_path))
    taken = 0

    def small(_: object) -> Any:
        class Usage:
            free = 1000 - taken

        return Usage

    monkeypatch.setattr(directory.shutil, "disk_usage", small)  # type: ignore[attr-defined]
    await upload(store, "bob", b"x" * 400)
    taken = 400
    assert await refused(upload(store, "bob", b"x" * 200)) == "request_too_large"
    await upload(store, "alice", b"x" * 200)


async def test_a_server_without_keys_uses_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "FILES_MAX", 3)
    store = FileStore(str(tmp_path))
    for _ in range(3):
        await (await store.create()).commit("a", "batch")
    assert await refused(store.create()) == "request_too_large"


async def test_the_description_of_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = FileStore(str(tmp_path))
    ids = {await upload(store, "alice", b"x") for _ in range(3)}
    with serving(Call(key=KEYS["alice"])):
        assert {one.id for one in await store.all()} == ids
        read: list[str] = []
        read_bytes = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or read_bytes(path))
        last = await upload(store, "alice", b"x")
        assert {one.id for one in await store.all()} == {*ids, last}
        assert read == [f"{last}.json"]
        await FileStore(str(tmp_path)).delete(last)
        assert {one.id for one in await store.all()} == ids


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(KEYS)), st.sampled_from(["put", "delete"]), st.integers(1, 300)), max_size=40
    )
)
async def test_whatever_the_others_do_a_new_key_finds_room(
    steps: list[tuple[str, str, int]], tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "FILES_MAX", 20)
        patch.setattr(limits, "FILES_BYTES_MAX", 2000)
        store, held = FileStore(str(path)), {name: list[tuple[str, int]]() for name in KEYS}
        for key, what, size in steps:
            if what == "put":
                sizes = [one for files in held.values() for _, one in files]
                try:
                    held[key].append((await upload(store, key, b"x" * size), size))
                except ServiceError:
                    own = [one for _, one in held[key]]
                    assert sum(own) + size > 2000 - sum(sizes) - size or len(own) + 1 > 20 - len(sizes) - 1
            elif held[key]:
                with serving(Call(key=KEYS[key])):
                    await store.delete(held[key].pop()[0])
        with serving(Call(key=ApiKey(name="new", digests=(b"n",)))):
            await (await store.create(1)).abort()


# --- a wrong clock ---


async def jumped(tmp_path: Path, clock: Clock, move: Callable[[Clock, Clock], None]) -> list[str]:
    """Returns the names that are left of a file after clocks have moved and an upload has looked at everything."""
    monotonic = Clock()
    store = FileStore(str(tmp_path), clock, monotonic)
    file_id = await upload(store, "alice", b"x")
    monotonic.now += limits.CLOCK_STEADY_S
    clock.now += limits.CLOCK_STEADY_S
    move(clock, monotonic)
    await upload(store, "bob", b"x")
    return [name for name in names(tmp_path) if name.startswith(file_id)]


async def test_a_clock_that_jumps_deletes_nothing(tmp_path: Path, clock: Clock):
    def jump(wall: Clock, _: Clock) -> None:
        wall.now += 40 * 24 * 3600

    assert len(await jumped(tmp_path, clock, jump)) == 2
    store = FileStore(str(tmp_path), clock)
    with serving(Call(key=KEYS["alice"])):
        assert await store.all() == [], "it has expired, if the clock is right"
        clock.now -= 40 * 24 * 3600
        assert len(await store.all()) == 1


async def test_time_that_passes_deletes(tmp_path: Path, clock: Clock):
    def passes(wall: Clock, monotonic: Clock) -> None:
        wall.now += limits.FILE_TTL_S
        monotonic.now += limits.FILE_TTL_S

    assert await jumped(tmp_path, clock, passes) == []


async def test_a_gateway_that_has_just_started_deletes_nothing(tmp_path: Path, clock: Clock):
    file_id = await upload(FileStore(str(tmp_path), clock, clock), "alice", b"x")
    clock.now += limits.FILE_TTL_S
    store = FileStore(str(tmp_path), clock, clock)
    await upload(store, "bob", b"x")
    assert (tmp_path / file_id).exists()
    clock.now += limits.CLOCK_STEADY_S
    await upload(store, "bob", b"x")
    assert not (tmp_path / file_id).exists()


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([0, 0, 30, -30, 100, -100, 10**7])), max_size=30))
def test_a_time_is_certain_only_after_an_even_run(moves: list[tuple[int, int]]):
    wall, monotonic = Clock(), Clock()
    clock, steady_since = WallClock(wall, monotonic), monotonic.now
    for passed, jump in moves:
        wall.now += passed + jump
        monotonic.now += passed
        if abs(jump) > limits.CLOCK_JUMP_S:
            steady_since = monotonic.now
        is_certain = monotonic.now - steady_since >= limits.CLOCK_STEADY_S
        assert clock.certain() == (wall.now if is_certain else -float("inf"))
