"""Shared memory of transfers: what both sides keep for the next one, and what they do not."""

from pathlib import Path

import pytest

from antiphon.services.engine.kv import shared_memory
from antiphon.services.engine.kv.shared_memory import ReceiverPool, SenderPool, SharedMemory, num_places
from antiphon.shared import limits

MIB, SIZE = 2**20, 100
HERE, THERE = "127.0.0.1:1", "127.0.0.1:2"


@pytest.fixture(autouse=True)
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for the names, instead of the system's."""
    monkeypatch.setattr(shared_memory, "SHARED_DIRECTORY", tmp_path)
    monkeypatch.setattr(limits, "KV_SHARED_BYTES", 4 * SIZE)
    return tmp_path


def take(pool: ReceiverPool, mark: str, address: str = HERE, size: int = SIZE) -> SharedMemory:
    taken = pool.take(address, mark, size)
    assert taken is not None
    return taken


def opened(pool: SenderPool, theirs: SharedMemory, mark: str) -> SharedMemory | None:
    return pool.open(theirs.name, mark, theirs.num_places, theirs.place_bytes)


def test_both_sides_see_the_same_bytes_in_each_transfer(names: Path) -> None:
    receiver, sender = ReceiverPool(), SenderPool()
    for number in range(3):
        mark = f"transfer {number}"
        ours = take(receiver, mark)
        theirs = opened(sender, ours, mark)
        assert theirs is not None
        ours.forget_name()
        assert not list(names.iterdir())
        theirs.place(3, SIZE)[:] = number + 1
        assert ours.place(3, SIZE).tolist() == [number + 1] * SIZE
        receiver.release(HERE, ours)
        sender.keep(theirs)


def test_memory_of_another_transfer_or_size_is_not_opened() -> None:
    receiver, sender = ReceiverPool(), SenderPool()
    ours = take(receiver, "right")
    assert opened(sender, ours, "wrong") is None
    assert sender.open(ours.name, "right", ours.num_places + 1, SIZE) is None
    assert sender.open("../" + ours.name, "right", ours.num_places, SIZE) is None
    assert sender.open(ours.name, "right", 0, SIZE) is None
    theirs = opened(sender, ours, "right")
    assert theirs is not None
    sender.keep(theirs)
    ours.forget_name()
    assert opened(sender, ours, "right, but the memory has not been marked for it") is None
    assert opened(sender, ours, "right") is None, "it has been dropped"


def test_memory_is_kept_for_its_sender_and_size_only() -> None:
    pool = ReceiverPool()
    first = take(pool, "1")
    pool.release(HERE, first)
    assert take(pool, "2", address=THERE) is not first
    assert take(pool, "3", size=SIZE + 1) is not first
    assert take(pool, "4") is first
    assert take(pool, "5") is not first, "it is in use"


def test_without_a_limit_above_one_block_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ReceiverPool()
    pool.release(HERE, take(pool, "1"))
    monkeypatch.setattr(limits, "KV_SHARED_BYTES_MAX", SIZE - 1)
    assert pool.take(HERE, "2", SIZE) is None


def test_a_receiver_keeps_the_last_few_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KV_SHARED_KEPT_MAX", 2)
    pool = ReceiverPool()
    for shared in [take(pool, str(number)) for number in range(3)]:
        pool.release(HERE, shared)
    assert len(pool._kept) == 2
    pool.expire()
    assert len(pool._kept) == 2
    monkeypatch.setattr(limits, "KV_SHARED_KEPT_S", 0.0)
    pool.expire()
    assert not pool._kept


def test_a_sender_keeps_the_last_few_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KV_SHARED_MAPPED_MAX", 2)
    receiver, sender = ReceiverPool(), SenderPool()
    all_ours = [take(receiver, str(number)) for number in range(3)]
    for number, ours in enumerate(all_ours):
        theirs = opened(sender, ours, str(number))
        assert theirs is not None
        sender.keep(theirs)
    assert list(sender._kept) == [ours.name for ours in all_ours[1:]]
    monkeypatch.setattr(limits, "KV_SHARED_KEPT_S", 0.0)
    sender.expire()
    assert not sender._kept


def test_closing_leaves_nothing(names: Path) -> None:
    pool = ReceiverPool()
    shared = take(pool, "1")
    assert list(names.iterdir())
    pool.release(HERE, shared)
    pool.close()
    assert not list(names.iterdir())


def test_without_room_there_is_no_shared_memory(names: Path) -> None:
    names.rmdir()
    assert ReceiverPool().take(HERE, "1", SIZE) is None


@pytest.mark.parametrize(("size", "count"), [(64 * 1024, 64), (2 * MIB, 2), (5 * MIB, 2), (20 * MIB, 1), (33 * MIB, 0)])
def test_there_are_two_places_for_all_but_the_largest_blocks(
    size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KV_SHARED_BYTES", 4 * MIB)
    monkeypatch.setattr(limits, "KV_SHARED_BYTES_MAX", 32 * MIB)
    assert num_places(size) == count
