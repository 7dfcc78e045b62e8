"""What one key may have of something bounded (`Shares`, `Kept`): properties over random sequences of calls."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from antiphon.shared.actors.fair_work import Shares
from antiphon.shared.security.api_keys import ANONYMOUS
from antiphon.shared.structures.kept import Kept

MOST = 100
KEYS = ("alice", "bob", "carol")


def test_one_key_alone_has_at_most_a_half_and_leaves_the_rest_to_others() -> None:
    shares = Shares(MOST)
    assert not shares.take("bob", 51)
    assert shares.take("bob", 50)
    assert not shares.take("bob", 1)
    assert shares.take("alice", 25)
    assert not shares.take("alice", 1)


def test_a_server_without_keys_may_use_everything() -> None:
    shares = Shares(MOST)
    assert shares.take(ANONYMOUS.name, MOST)
    assert not shares.take(ANONYMOUS.name, 1)


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 60), st.booleans())))
def test_a_key_that_comes_later_finds_room_and_what_is_given_back_is_free(
    calls: list[tuple[str, int, bool]],
) -> None:
    shares, taken = Shares(MOST), list[tuple[str, int]]()
    for key, amount, gives_back in calls:
        if gives_back and taken:
            shares.give_back(*taken.pop())
        elif shares.take(key, amount):
            taken.append((key, amount))
        assert shares.total == sum(amount for _, amount in taken) <= MOST
        newcomer = Shares(MOST)
        for one in taken:
            newcomer.take(*one)
        assert newcomer.take("dave", (MOST - shares.total) // 2)
    for one in taken:
        shares.give_back(*one)
    assert shares.total == 0


def test_the_key_that_has_most_loses_its_oldest_entry() -> None:
    kept = Kept(MOST)
    assert kept.put("alice", "a", 10) == []
    assert [gone for number in range(9) for gone in kept.put("bob", f"b{number}", 10)] == []
    kept.touch("b0")
    assert kept.put("bob", "b9", 20) == ["b1", "b2"]
    assert kept.put("alice", "a2", 10) == ["b3"]
    assert kept.put("bob", "huge", MOST + 1)[-1] == "huge"
    assert "a" in kept
    assert "huge" not in kept


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 20), st.integers(0, 70))))
def test_entries_fit_and_a_key_below_its_equal_part_loses_nothing(calls: list[tuple[str, int, int]]) -> None:
    kept, model = Kept(MOST), OrderedDict[str, tuple[str, int]]()
    for key, number, size in calls:
        entry = f"{key}-{number}"
        gone = kept.put(key, entry, size)
        model.pop(entry, None)
        model[entry] = key, size
        for one in gone:
            owner, dropped = model[one]
            held = sum(bytes_ for of, bytes_ in model.values() if of == owner)
            assert held == max(sum(b for of, b in model.values() if of == each) for each in KEYS)
            assert held * len(KEYS) >= MOST or dropped == 0
            del model[one]
        assert kept.num_bytes == sum(size for _, size in model.values()) <= MOST
        assert all(one in kept for one in model)


def test_what_is_in_use_stays_and_what_is_new_goes_if_nothing_else_of_its_key_can() -> None:
    kept = Kept(MOST)
    kept.use("b0")
    assert kept.put("alice", "a", 20) == kept.put("bob", "b0", 40) == kept.put("bob", "b1", 30) == []
    kept.use("b1")
    assert kept.put("bob", "b2", 30) == ["b2"]
    kept.release("b0")
    assert kept.put("bob", "b2", 30) == ["b0"]
    kept.use("b2")
    assert kept.put("alice", "a2", 30) == ["a"]
    assert kept.put("bob", "b1", 50) == ["a2"], "nothing of the largest key can go"
    assert kept.put("bob", "b1", 200) == []
    assert kept.num_bytes == 230


class Place(RuleBasedStateMachine):
    """Entries that are put, used, released and removed in any order, against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept(MOST)
        self.sizes: dict[str, int] = {}
        self.in_use: set[str] = set()

    @rule(key=st.sampled_from(KEYS), number=st.integers(0, 4), size=st.integers(0, 70))
    def put(self, key: str, number: int, size: int) -> None:
        self.sizes[f"{key}-{number}"] = size
        for gone in self.kept.put(key, f"{key}-{number}", size):
            assert gone not in self.in_use
            del self.sizes[gone]

    @rule(key=st.sampled_from(KEYS), number=st.integers(0, 4), action=st.sampled_from(("use", "release", "remove")))
    def change(self, key: str, number: int, action: str) -> None:
        entry = f"{key}-{number}"
        getattr(self.kept, action)(entry)
        if action == "remove":
            self.sizes.pop(entry, None)
        else:
            (self.in_use.add if action == "use" else self.in_use.discard)(entry)

    @invariant()
    def counted(self) -> None:
        assert self.kept.num_bytes == sum(self.sizes.values())
        assert all(entry in self.kept for entry in self.sizes)
        for gone in self.kept.shrink():  # entries were released
            del self.sizes[gone]
        assert self.kept.num_bytes <= MOST or self.sizes.keys() <= self.in_use


TestPlace = Place.TestCase
