"""A follower of a prefix cache knows, in the end, exactly the blocks that the pool has, whatever is lost on the way."""

import random

import pytest

from antiphon.services.engine.block_events.log import BlockLog
from antiphon.services.engine.core.kv.block_pool import BlockPool
from antiphon.services.gateway.guests.prefix_caches.follower import ANEW, Follower
from antiphon.shared import limits
from antiphon.shared.blocks import block_name, block_names, pack_block_events, unpack_block_events
from antiphon.shared.messages import BlockEvents, BlockSnapshot

NUM_BLOCKS, STEPS = 24, 400
ENGINE = ("e", "i")


class Engine:
    """A pool that is filled and emptied at random, and what the engine's feed does with requests."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.pool, self.log = rng, BlockPool(NUM_BLOCKS), BlockLog()
        self.pool.watchers = (self.log,)
        self.held: list[int] = []

    def step(self) -> None:
        if self.held and self.rng.random() < 0.5:
            self.pool.free([self.held.pop(self.rng.randrange(len(self.held)))])
        elif (blocks := self.pool.allocate(1)) is not None:
            self.pool.register(blocks[0], bytes([self.rng.randrange(60)]) * 16)
            self.held += blocks

    def publish(self) -> list[BlockEvents]:
        return [BlockEvents(*ENGINE, position, events) for position, events in self.log.take()[0]]

    def answer(self, position: int) -> list[BlockEvents | BlockSnapshot]:
        if (kept := self.log.since(position)) is not None:
            return [BlockEvents(*ENGINE, first, events) for first, events in kept]
        self.log.put_snapshot(self.pool.content())
        _, snapshot = self.log.take()
        if snapshot is None:
            return []
        at, content = snapshot
        names = [block_name(one) for one in content]
        parts = [names[start : start + 5] for start in range(0, len(names), 5)] or [[]]
        return [
            BlockSnapshot(
                engine_id="e",
                engine_instance_id="i",
                position=at,
                part=number,
                num_parts=len(parts),
                names=pack_block_events(part),
            )
            for number, part in enumerate(parts)
        ]

    def names(self) -> set[int]:
        return {block_name(one) for one in self.pool.content()}


def deliver(follower: Follower, message: BlockEvents | BlockSnapshot, now: float) -> None:
    if isinstance(message, BlockEvents):
        follower.on_events(message)
    else:
        follower.on_snapshot(message, now)


@pytest.mark.parametrize("seed", range(30))
def test_a_follower_agrees_with_the_pool_after_losses_delays_and_overflows(seed, monkeypatch):
    monkeypatch.setattr(limits, "BLOCK_EVENTS_BATCH", 4)
    monkeypatch.setattr(limits, "BLOCK_EVENTS_KEPT", 30)
    monkeypatch.setattr(limits, "BLOCK_EVENTS_MAX", 40)
    monkeypatch.setattr(limits, "BLOCK_BATCHES_HELD", 8)
    rng = random.Random(seed)
    engine, follower, now = Engine(rng), Follower(NUM_BLOCKS), 0.0
    on_the_way: list[BlockEvents | BlockSnapshot] = []
    loss, calm = rng.choice((0.0, 0.2, 0.5)), False
    for step in range(STEPS):
        calm = step > STEPS - 40
        now += 0.1
        for _ in range(0 if calm else rng.choice((1, 3, 60 if rng.random() < 0.02 else 5))):
            engine.step()
        if calm or rng.random() < 0.7:
            on_the_way += engine.publish()
        if (position := follower.wish(now)) is not None and (calm or rng.random() > loss):
            on_the_way += engine.answer(position)
        if not calm:
            on_the_way = [one for one in on_the_way if rng.random() > loss]
            rng.shuffle(on_the_way)
        due = len(on_the_way) if calm else rng.randrange(len(on_the_way) + 1)
        for message in on_the_way[:due]:
            deliver(follower, message, now)
        del on_the_way[:due]
        assert len(follower.known.present) <= 2 * NUM_BLOCKS
    assert follower.is_synced
    assert follower.known.present == engine.names()


def test_without_losses_a_follower_takes_one_snapshot_and_agrees_after_every_batch():
    engine, follower = Engine(random.Random(1)), Follower(NUM_BLOCKS)
    assert follower.wish(0.0) == ANEW
    for message in engine.answer(ANEW):
        deliver(follower, message, 0.0)
    for _ in range(200):
        engine.step()
        for message in engine.publish():
            deliver(follower, message, 0.0)
        assert follower.known.present == engine.names()
    assert (follower.num_snapshots, follower.num_gaps) == (1, 0)


def test_names_are_those_of_the_joined_hashes_and_malformed_events_are_refused():
    hashes = [random.Random(n).randbytes(16) for n in range(5)]
    assert block_names(b"".join(hashes)) == [block_name(one) for one in hashes]
    with pytest.raises(ValueError, match="bytes of block events"):
        unpack_block_events(b"123")


def test_a_log_that_nobody_takes_from_is_bounded_and_makes_a_jump(monkeypatch):
    monkeypatch.setattr(limits, "BLOCK_EVENTS_MAX", 10)
    log = BlockLog()
    for number in range(25):
        log.stored(bytes([number]) * 16)
    assert log.num_untaken == 10
    before = log.end
    assert log.take() == ([], None)
    assert log.end > before + 10
    assert log.since(before) is None
    assert log.dropped == 1
