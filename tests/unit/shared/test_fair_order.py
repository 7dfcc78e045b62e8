"""Fair order: shares in proportion to weights, no saved-up shares, priorities first, bounded memory."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared.structures.fair_order import IDLE_MAX, FairOrder


def serve(order: FairOrder, tokens: float = 1.0) -> str:
    name = order.first()
    assert name is not None
    order.serve(name, tokens)
    return name


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=5),
    st.lists(st.integers(1, 50), min_size=50, max_size=300),
)
def test_clients_that_always_wait_get_tokens_in_proportion_to_their_weights(weights, costs):
    order, got = FairOrder(), Counter[str]()
    for number, weight in enumerate(weights):
        order.activate(str(number), weight)
    for cost in costs:
        got[serve(order, cost)] += cost
    shares = [got[str(number)] / weight for number, weight in enumerate(weights)]
    # At any time no client is ahead of another by more than one piece of its work.
    assert max(shares) - min(shares) <= max(costs) / min(weights)


@given(st.integers(1, 500), st.integers(1, 40))
def test_a_newcomer_waits_for_one_piece_of_work_of_each_other_client(burst: int, others: int):
    order = FairOrder()
    for number in range(others):
        order.activate(f"old{number}")
    for _ in range(burst):
        serve(order)
    order.activate("new")
    served = [serve(order) for _ in range(others + 1)]
    assert "new" in served


def test_idle_time_is_neither_saved_nor_owed_and_debts_are_kept():
    order = FairOrder()
    order.activate("a")
    order.activate("b")
    order.serve("b", 100)
    order.deactivate("b")
    for _ in range(10):
        assert serve(order) == "a"
    order.activate("b")
    assert [serve(order) for _ in range(3)] == ["a"] * 3, "it has got its share in advance"
    order.deactivate("a")
    for _ in range(1000):
        assert serve(order) == "b"
    order.activate("a")
    assert Counter(serve(order) for _ in range(10)) == {"a": 5, "b": 5}


def test_a_correction_counts_whether_the_client_waits_or_not():
    order = FairOrder()
    for name in ("a", "b"):
        order.activate(name)
    order.serve("a", 100)
    order.adjust("a", -99)
    assert [serve(order, 10), serve(order, 10)] == ["b", "a"]
    order.deactivate("a")
    order.adjust("a", 1000)
    order.adjust("unknown", 1000)
    order.activate("a")
    assert {serve(order) for _ in range(50)} == {"b"}


def test_priorities_go_first_and_may_change():
    order = FairOrder()
    order.activate("low", priority=5)
    order.activate("high", priority=-5)
    assert {serve(order) for _ in range(9)} == {"high"}
    order.activate("low", priority=-5)
    assert {serve(order) for _ in range(9)} == {"low", "high"}
    assert order.first(lambda name: name == "low") == "low"
    assert order.first(lambda name: False) is None
    order.activate("low", priority=5)
    assert order.first(lambda name: name == "low") is None, "a client of an earlier priority waits"
    order.deactivate("high")
    assert order.first(lambda name: name == "low") == "low"


def test_clients_that_left_are_forgotten():
    order = FairOrder()
    for number in range(5 * IDLE_MAX):
        order.activate(str(number))
        order.serve(str(number), 1 + number)
        order.deactivate(str(number))
    assert len(order._idle) <= IDLE_MAX
    assert order.first() is None
