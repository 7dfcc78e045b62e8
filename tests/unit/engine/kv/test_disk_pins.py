"""Pinned segments: kept longer than others, within half of the directory, whatever is written, read and restarted."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.kv.disk import pins as pins_module
from antiphon.services.engine.kv.disk import store as store_module
from antiphon.services.engine.kv.disk.pins import Found, eviction_order, found_in
from antiphon.services.engine.kv.disk.segment import is_alive
from antiphon.services.engine.kv.disk.store import Store
from antiphon.services.engine.kv.pieces import checksum
from antiphon.shared import limits
from antiphon.shared.parameters.sampling import SamplingParams
from tests.models import make_model
from tests.support.slow import slow_but
from tests.unit.engine.kv import test_disk_tier as disk_tier
from tests.unit.engine.kv.engines import PROMPT, Running, run, started

MIB = 2**20
BLOCK = np.arange(8000, dtype=np.uint16).view(np.uint8)[:8000]


class Clock:
    """The time of this machine, which a test moves on."""

    def __init__(self) -> None:
        self.later_s = 0.0

    def time(self) -> float:
        return time.time() + self.later_s

    def time_ns(self) -> int:
        return time.time_ns()

    def monotonic(self) -> float:
        return time.monotonic() + self.later_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(store_module, "time", made)
    monkeypatch.setattr(pins_module, "time", made)
    return made


@pytest.fixture
def stores() -> Iterator[list[Store]]:
    """Those to close."""
    made: list[Store] = []
    yield made
    for store in made:
        store.close()


def put(store: Store, name: str, keep_s: float = 0.0) -> bool:
    return store.append(name.encode(), BLOCK, 16, checksum(BLOCK), keep_s)


def fill(store: Store, name: str, count: int = 200) -> None:
    """Writes more than the directory takes."""
    for number in range(count):
        assert put(store, f"{name} {number}")


def test_pinned_segments_go_after_all_others_and_those_beyond_half_before() -> None:
    now_s = 1000.0
    found = {name: Found(10, used_s) for name, used_s in {"old": 1, "new": 999, "soon": 1001, "late": 2000}.items()}
    assert eviction_order(found, 40, now_s) == ["old", "new", "soon", "late"]
    assert eviction_order(found, 20, now_s) == ["soon", "old", "new", "late"]
    assert eviction_order(found, 0, now_s) == ["soon", "late", "old", "new"]


def test_a_pinned_block_outlives_a_directory_of_others_and_a_restart_until_its_time_is_over(
    tmp_path: Path, stores: list[Store]
) -> None:
    first = Store(tmp_path, MIB)
    assert put(first, "pinned", keep_s=300)
    assert put(first, "plain")
    first.close()
    again = Store(tmp_path, MIB)
    fill(again, "a")
    again.refresh()
    assert (b"pinned" in again, b"plain" in again) == (True, False)
    again.close()
    for path in tmp_path.iterdir():
        used_s = path.stat().st_mtime - 400
        os.utime(path, (used_s, used_s))
    later = Store(tmp_path, MIB)
    stores.append(later)
    fill(later, "b")
    assert b"pinned" not in later


def test_what_is_there_already_can_be_pinned_and_reading_does_not_end_the_pin(
    tmp_path: Path, stores: list[Store], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_USED_S", 0.0)
    writer, other = Store(tmp_path, MIB), Store(tmp_path, MIB)
    stores.append(other)
    assert put(writer, "here")
    other.refresh()
    other.keep((b"here", b"missing"), 300)
    # The other engine still appends to the segment, which moves the time of its files back.
    assert put(writer, "beside")
    assert other.read(b"here", memoryview(bytearray(8192))) is not None
    other.refresh()
    writer.close()
    other.refresh()
    fill(other, "a")
    assert b"here" in other
    other.keep((b"here",), 1)
    clock.later_s = 200
    fill(other, "b")
    assert b"here" in other, "a shorter pin has ended the longer one"


def test_no_more_than_half_is_pinned_and_the_rest_is_written_without(
    tmp_path: Path, stores: list[Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, MIB)
    stores.append(store)
    for number in range(400):
        assert put(store, f"pinned {number}", keep_s=3600)
    assert "half of --kv-disk-gb" in caplog.text
    now_s, found = time.time(), found_in(tmp_path)
    pinned = sum(each.size for each in found.values() if each.used_s > now_s)
    assert MIB * 0.35 < pinned <= MIB // 2
    assert b"pinned 0" in store, "the first ones keep their places"
    assert b"pinned 399" in store


@pytest.mark.parametrize("seed", slow_but(range(3), range(60)))
def test_the_bound_holds_and_an_unpinned_segment_goes_before_a_pinned_one(
    seed: int, tmp_path: Path, stores: list[Store], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_USED_S", 0.0)
    draw, limit, names = random.Random(seed), MIB, list[str]()
    stores += [Store(tmp_path, limit), Store(tmp_path, limit)]
    deleted = 0
    for number in range(700):
        place = draw.randrange(2)
        store, before = stores[place], found_in(tmp_path)
        living = {name for name in before if is_alive(tmp_path / name)}
        now_s = clock.time()
        action = draw.random()
        if action < 0.75:
            names.append(f"block {number}")
            put(store, names[-1], keep_s=draw.choice((0, 0, 0, 60, 3600)))
        elif action < 0.85 and names:
            store.keep([name.encode() for name in draw.sample(names, min(len(names), 3))], draw.choice((60, 3600)))
        elif action < 0.93 and names:
            store.read(draw.choice(names).encode(), memoryview(bytearray(8192)))
        elif action < 0.96:
            clock.later_s += draw.choice((1, 50))
        elif action < 0.98:
            store.close()
            stores[place] = Store(tmp_path, limit)
        else:
            stores[0].refresh()
            stores[1].refresh()
        after = found_in(tmp_path)
        assert sum(each.size for each in after.values()) <= limit
        gone = before.keys() - after.keys()
        deleted += len(gone)
        order = [name for name in eviction_order(before, limit, now_s) if name not in living]
        # What was deleted is the beginning of the order: nothing without a pin was left while a pinned one went.
        assert set(order[: len(gone)]) == gone
        pinned = sum(each.size for each in after.values() if each.used_s > clock.time())
        assert pinned <= limit // 2
    assert deleted > 20


FAMILIES = ["llama", "gemma2", "qwen3_5"]


@pytest.mark.parametrize("family", slow_but(["llama", "qwen3_5"], FAMILIES))
def test_the_prompt_of_a_request_is_kept_when_others_need_its_room(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "KV_TIER_TOKENS_MIN", 32)
    name, overrides = disk_tier.FAMILIES[family]
    model = make_model(tmp_path / "model", name, **overrides)
    disk = {"kv_disk_gb": 0.002, "kv_disk_path": str(tmp_path / "kv")}
    pinned, late, plain = PROMPT, (*PROMPT[50:], *PROMPT[:50]), PROMPT[::-1]
    with started(model, **disk) as first:
        right = [ask(first, "pinned", pinned, keep_s=3600), ask(first, "late", late)]
        ask(first, "between", PROMPT[20::-1] * 5)  # so that the next one is in segments of its own
        right.append(ask(first, "plain", plain))
        disk_tier.written(first)
        assert ask(first, "late again", late, keep_s=3600) == right[1]
        disk_tier.written(first)
    with started(model, **disk) as second:
        store = second.engine.connector.tier.store  # type: ignore[union-attr]
        first_size = len(store)
        for number in range(60):
            ask(second, f"other {number}", tuple(3 + (number * token + token) % 250 for token in range(2, 98)))
            disk_tier.written(second)
        assert len(store) < first_size + 60 * 6, "nothing had to make room"
    with started(model, **disk) as again:
        assert [ask(again, "pinned", pinned), ask(again, "late", late)] == right[:2]
        assert [again.origins[name].num_stored for name in ("pinned", "late")] == [96, 96]
        assert ask(again, "plain", plain) == right[2]
        assert again.origins["plain"].num_stored == 0


def ask(running: Running, name: str, prompt: tuple[int, ...], keep_s: float = 0.0) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    spec = SequenceSpec(sequence_id=name, prompt_token_ids=prompt, params=params, kv_keep_s=keep_s)
    running.engine.add(spec)
    return run(running, until=(running, name))
