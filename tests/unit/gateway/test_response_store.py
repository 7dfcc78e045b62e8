from collections import Counter
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from antiphon.services.gateway.guests.responses.stored.records import MemoryRecords
from antiphon.services.gateway.guests.responses.stored.store import ResponseStore, StoredResponse
from antiphon.shared.request.conversation import Turn

MAX_BYTES, TTL_S = 8000, 10.0


KEYS = {"a": "alice", "b": "alice", "c": "bob", "d": "bob", "e": "bob", "f": "carol"}
"""The key of each response."""


def record(response_id: str, size: int = 0) -> StoredResponse:
    turns, key = [Turn(role="user", content="x" * size)], KEYS[response_id]
    return StoredResponse(response={"id": response_id}, input_items=[], turns=turns, key_name=key)


def run(coroutine: Any) -> Any:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("the store waited")


class Store(RuleBasedStateMachine):
    """Against a model: a list of (id, time of expiry), the least recently used one first."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.records = MemoryRecords(lambda: self.now, max_bytes=MAX_BYTES, ttl_s=TTL_S)
        self.store = ResponseStore(self.records)
        self.kept: dict[str, tuple[int, float]] = {}

    def shrink(self) -> None:
        self.kept = {name: one for name, one in self.kept.items() if one[1] > self.now}
        while sum(size for size, _ in self.kept.values()) > MAX_BYTES:
            held = Counter[str]()
            for name, (size, _) in self.kept.items():
                held[KEYS[name]] += size
            # The key that has most loses its least recently used response.
            largest = max(held.values())
            candidates = [key for key in held if held[key] == largest]
            if len(candidates) > 1:
                gone = next(
                    name for name in self.kept if name not in self.records._records and KEYS[name] in candidates
                )
            else:
                gone = next(name for name in self.kept if KEYS[name] == candidates[0])
            del self.kept[gone]

    @rule(name=st.sampled_from("abcdef"), size=st.integers(0, 9000))
    def put(self, name: str, size: int) -> None:
        one = record(name, size)
        run(self.store.put(one))
        self.kept.pop(name, None)
        self.kept[name] = (1024 + len(msgspec.json.encode(one)), self.now + TTL_S)
        self.shrink()

    @rule(name=st.sampled_from("abcdef"))
    def get(self, name: str) -> None:
        self.shrink()
        found = run(self.store.get(name))
        assert (found is not None) == (name in self.kept)
        if found is not None:
            assert found.id == name
            self.kept[name] = self.kept.pop(name)

    @rule(name=st.sampled_from("abcdef"))
    def delete(self, name: str) -> None:
        self.shrink()
        assert run(self.store.delete(name)) == (self.kept.pop(name, None) is not None)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def bounded(self) -> None:
        held = self.records._records.values()
        assert sum(1024 + len(one.logged.payload) for one in held) == self.records._kept.num_bytes <= MAX_BYTES
        assert sorted(one.expires_at for one in held) == [one.expires_at for one in held]


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30)
