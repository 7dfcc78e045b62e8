"""The segments of KV blocks on a disk: what is found again after damage of every kind, and how much room they take."""

import errno
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from antiphon.services.engine.kv.disk import store as store_module
from antiphon.services.engine.kv.disk.segment import DATA, ENTRY_BYTES, INDEX, SystemFiles
from antiphon.services.engine.kv.disk.store import Store
from antiphon.services.engine.kv.pieces import Bytes, checksum
from tests.support.slow import slow_but

MIB = 2**20


@pytest.fixture
def stores() -> Iterator[list[Store]]:
    """Those to close."""
    made: list[Store] = []
    yield made
    for store in made:
        store.close()


def block_of(draw: random.Random, size: int) -> Bytes:
    return np.frombuffer(draw.randbytes(size), dtype=np.uint8)


def put(store: Store, name: bytes, data: Bytes, num_tokens: int = 16) -> bool:
    return store.append(name, data, num_tokens, checksum(data))


def get(store: Store, name: bytes) -> bytes | None:
    """A block as its readers take it: only if its checksum is right."""
    buffer = bytearray(2**16)
    entry = store.read(name, memoryview(buffer))
    if entry is None or checksum(np.frombuffer(buffer, dtype=np.uint8, count=entry.size)) != entry.checksum:
        return None
    return bytes(buffer[: entry.size])


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{INDEX}"))


def test_blocks_are_found_by_the_engines_of_a_host_and_by_later_ones(tmp_path: Path, stores: list[Store]) -> None:
    draw = random.Random(1)
    blocks = {draw.randbytes(16): block_of(draw, draw.randint(1, 9000)) for _ in range(20)}
    writer, reader = Store(tmp_path, 64 * MIB), Store(tmp_path, 64 * MIB)
    stores += [writer, reader]
    for name, data in blocks.items():
        assert put(writer, name, data)
        assert put(writer, name, data), "a block that is there is not written again"
    assert not len(reader)
    reader.refresh()
    later = Store(tmp_path, 64 * MIB)
    stores.append(later)
    for store in (writer, reader, later):
        assert {name: get(store, name) for name in blocks} == {name: data.tobytes() for name, data in blocks.items()}
        assert get(store, b"missing") is None
    # An engine that lives writes on, and the others find it.
    put(writer, b"more", blocks[next(iter(blocks))])
    later.refresh()
    assert b"more" in later
    assert len(segments(tmp_path)) == 1
    assert tmp_path.stat().st_mode & 0o077 == 0 or tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.matrix("K-03")
@pytest.mark.parametrize("num_cuts", slow_but([500], [500, 10_000]))
def test_whatever_a_power_cut_leaves_nothing_wrong_is_read(tmp_path: Path, num_cuts: int) -> None:
    draw = random.Random(num_cuts)
    names = [draw.randbytes(draw.choice((16, 18))) for _ in range(12)]
    blocks = {name: block_of(draw, draw.choice((100, 512, 4096, 5000))) for name in names}
    whole = Store(tmp_path / "whole", 64 * MIB)
    for name, data in blocks.items():
        put(whole, name, data)
    whole.close()
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    directory, found, lost = tmp_path / "cut", 0, 0
    directory.mkdir()
    for _ in range(num_cuts):
        for name, content in files.items():
            (directory / name).write_bytes(damaged(draw, content))
        store = Store(directory, 64 * MIB)
        for name, data in blocks.items():
            read = get(store, name)
            assert read in (None, data.tobytes())
            found, lost = found + (read is not None), lost + (read is None)
        # It goes on beside what is damaged.
        assert put(store, b"new", blocks[names[0]])
        assert get(store, b"new") == blocks[names[0]].tobytes()
        store.close()
        for path in directory.iterdir():
            path.unlink()
    assert found > num_cuts
    assert lost > num_cuts


def damaged(draw: random.Random, content: bytes) -> bytes:
    """What a power cut may leave of a file: the end missing, pages that were never written, a flipped bit."""
    changed = bytearray(content)
    for kind in draw.choices(("cut", "zeros", "flip", "nothing"), k=draw.randint(1, 3)):
        place = draw.randrange(max(1, len(changed)))
        if kind == "cut":
            del changed[place:]
        elif kind == "zeros":
            end = min(len(changed), place + draw.choice((ENTRY_BYTES, 512, 4096)))
            changed[place:end] = bytes(end - place)
        elif kind == "flip" and changed:
            changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def test_an_entry_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path, stores: list[Store]) -> None:
    writer, data = Store(tmp_path, 64 * MIB), np.arange(100, dtype=np.uint8)
    stores.append(writer)
    put(writer, b"first", data)
    put(writer, b"second", data)
    (index,) = segments(tmp_path)
    whole = index.read_bytes()
    index.write_bytes(whole[: ENTRY_BYTES + 20])
    reader = Store(tmp_path, 64 * MIB)
    stores.append(reader)
    assert (b"first" in reader, b"second" in reader) == (True, False)
    index.write_bytes(whole[: ENTRY_BYTES + 20] + bytes(44))
    reader.refresh()
    assert b"second" not in reader
    index.write_bytes(whole)
    reader.refresh()
    assert get(reader, b"second") == data.tobytes()


def test_the_segments_used_longest_ago_make_room_and_living_engines_keep_theirs(
    tmp_path: Path, stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_USED_S", 0.0)
    limit, data = MIB, np.arange(8192, dtype=np.uint16).view(np.uint8)[:8192]
    store, other = Store(tmp_path, limit), Store(tmp_path, limit)
    stores += [store, other]
    put(other, b"of another engine", data)
    kept = [f"block {number}".encode() for number in range(4)]
    for number in range(400):
        assert put(store, f"block {number}".encode(), data)
        for name in kept[: number + 1]:
            assert get(store, name) is not None, "a segment in use was deleted"
        store.refresh()
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert total <= limit
    assert b"block 399" in store
    assert b"block 60" not in store
    assert get(other, b"of another engine") is not None
    other.refresh()
    assert b"block 399" in other
    assert b"block 60" not in other


class Broken(SystemFiles):
    """Files whose writes, or reads, fail."""

    def __init__(self, number: int) -> None:
        self.number, self.fails = number, False

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        if self.fails:
            super().write(file, memoryview(data)[: len(data) // 2], offset)
            raise OSError(self.number, "broken")
        super().write(file, data, offset)

    def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
        if self.fails:
            raise OSError(self.number, "broken")
        return super().read_into(file, buffer, offset)


@pytest.mark.matrix("K-02")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_or_broken_disk_costs_blocks_but_nothing_else(
    tmp_path: Path, stores: list[Store], number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, data = Broken(number), np.arange(200, dtype=np.uint8)
    store = Store(tmp_path, 64 * MIB, files)
    stores.append(store)
    assert put(store, b"first", data)
    files.fails = True
    assert not put(store, b"second", data)
    assert "is not written to" in caplog.text
    assert get(store, b"first") is None
    files.fails = False
    assert not store.writes
    assert not put(store, b"third", data), "it waits before it tries again"
    monkeypatch.setattr(store, "_not_before_s", 0.0)
    assert put(store, b"third", data)
    assert get(store, b"third") == data.tobytes()
    assert b"second" not in store


def test_a_directory_without_room_for_a_segment_is_told_of(
    tmp_path: Path, stores: list[Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, MIB)
    stores.append(store)
    assert not put(store, b"large", np.zeros(MIB // 16, dtype=np.uint8))
    assert "--kv-disk-gb" in caplog.text
    assert not list(tmp_path.glob(f"*{DATA}"))


WRITER = """
import random, sys
from pathlib import Path
import numpy as np
from antiphon.services.engine.kv.disk.store import Store
from antiphon.services.engine.kv.pieces import checksum

store, number = Store(Path(sys.argv[1]), 2**26), 0
print("writes", flush=True)
while True:
    name = f"{sys.argv[2]} {number}".encode()
    data = np.frombuffer(random.Random(name).randbytes(20_000), dtype=np.uint8)
    store.append(name, data, 16, checksum(data))
    number += 1
"""


@pytest.mark.matrix("K-03")
def test_what_killed_engines_wrote_is_read(tmp_path: Path) -> None:
    draw = random.Random(20)
    for number in range(20):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(number)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writes\n"
        time.sleep(draw.random() * 0.05)
        writer.kill()
        writer.wait()
        writer.stdout.close()
    store = Store(tmp_path, 64 * MIB)
    found = 0
    for number in range(20):
        place = 0
        while (name := f"{number} {place}".encode()) in store:
            assert get(store, name) == random.Random(name).randbytes(20_000)
            found, place = found + 1, place + 1
    store.close()
    assert found > 100
