"""The engine's half of sessions: blocks from its store and to it, in parts, with bounded memory."""

import asyncio
import random
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from antiphon.services.engine.kv.disk.store import Store
from antiphon.services.engine.kv.disk.tier import StoredBlock
from antiphon.services.engine.kv.pieces import checksum
from antiphon.services.engine.sessions.blocks import SessionBlocks
from antiphon.shared import limits
from antiphon.shared.messages import FindBlocks, ReadBlock, WriteBlock

FORM, SIZE = "form", 10_000


class TierOfStore:
    """A real store without the threads of a tier, whose cache needs a worker."""

    identity, block_bytes = FORM, SIZE

    def __init__(self, path: Path) -> None:
        self.store = Store(path, 2**20)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, bytes) and name in self.store

    async def read(self, names: tuple[bytes, ...]) -> list[StoredBlock]:
        found = list[StoredBlock]()
        for name in names:
            data = np.empty(SIZE, dtype=np.uint8)
            entry = self.store.read(name, data.data)
            if entry is not None and checksum(data) == entry.checksum:
                found.append(StoredBlock(name, data, entry.checksum))
        return found

    def keep(self, block: StoredBlock) -> "Future[bool]":
        done = Future[bool]()
        done.set_result(self.store.append(block.name, block.data, 16, block.checksum))
        return done


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SessionBlocks:
    monkeypatch.setattr(limits, "SESSION_PIECE_BYTES", 3000)
    return SessionBlocks(TierOfStore(tmp_path))


def part(name: bytes, data: bytes, offset: int, *, form: str = FORM, size: int = SIZE) -> WriteBlock:
    return WriteBlock(form=form, name=name, size=size, offset=offset, data=data[offset : offset + 3000])


async def write(blocks: SessionBlocks, name: bytes, data: bytes) -> list[str]:
    return [(await blocks.write(part(name, data, offset))).refusal for offset in range(0, len(data), 3000)]


async def read(blocks: SessionBlocks, name: bytes) -> bytes:
    data = b""
    while piece := (await blocks.read(ReadBlock(name, len(data)))).data:
        data += piece
        if len(data) == SIZE:
            break
    return data


async def test_what_was_written_is_found_and_read(blocks: SessionBlocks) -> None:
    contents = {name: random.Random(name).randbytes(SIZE) for name in (b"a" * 16, b"b" * 16, b"a" * 16 + b"\0\0")}
    for name, data in contents.items():
        assert await write(blocks, name, data) == [""] * 4
    found = blocks.find(FindBlocks((b"b" * 16, b"c" * 16, b"a" * 16)))
    assert (found.form, found.block_bytes) == (FORM, SIZE)
    assert found.names == (b"b" * 16, b"a" * 16, b"a" * 16 + b"\0\0")
    for name, data in contents.items():
        assert await read(blocks, name) == data
    assert (await blocks.read(ReadBlock(b"c" * 16))).size == 0


async def test_blocks_of_another_form_or_size_are_refused(blocks: SessionBlocks) -> None:
    data = bytes(SIZE)
    assert "another form" in (await blocks.write(part(b"a" * 16, data, 0, form="other"))).refusal
    assert "another form" in (await blocks.write(part(b"a" * 16, data, 0, size=SIZE + 1))).refusal


async def test_parts_that_are_missing_or_too_long_leave_no_block(blocks: SessionBlocks) -> None:
    name, data = b"a" * 16, bytes(SIZE)
    assert (await blocks.write(part(name, data, 3000))).refusal
    assert not (await blocks.write(part(name, data, 0))).refusal
    assert (await blocks.write(part(name, data, 6000))).refusal
    assert not (await blocks.write(part(name, data, 0))).refusal
    too_long = WriteBlock(form=FORM, name=name, size=SIZE, offset=3000, data=bytes(SIZE))
    assert (await blocks.write(too_long)).refusal
    assert not blocks.find(FindBlocks((name,))).names


async def test_few_blocks_arrive_at_a_time(blocks: SessionBlocks) -> None:
    names = [bytes([number]) * 16 for number in range(limits.SESSION_WRITES_MAX + 1)]
    for name in names:
        assert not (await blocks.write(part(name, bytes(SIZE), 0))).refusal
    assert (await blocks.write(part(names[0], bytes(SIZE), 3000))).refusal
    assert not (await blocks.write(part(names[-1], bytes(SIZE), 3000))).refusal


def test_a_disk_without_room_is_told(tmp_path: Path) -> None:
    tier = TierOfStore(tmp_path)
    tier.store = Store(tmp_path / "small", 100)
    taken = asyncio.run(
        SessionBlocks(tier).write(WriteBlock(form=FORM, name=b"a", size=SIZE, offset=0, data=bytes(SIZE)))
    )
    assert "no room" in taken.refusal
