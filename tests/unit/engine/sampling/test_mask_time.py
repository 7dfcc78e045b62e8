"""The time of masks: what a grammar may take, whose masks come first, and what that means for everybody."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.engine.sampling.mask_time import SHORT_S, MaskAccount, Stopwatch, in_turn
from antiphon.shared import limits

STEP_S = limits.MASKS_STEP_LEAST_S
COSTS = st.lists(st.floats(0.0, 0.05), max_size=40)


def spent(costs: list[float]) -> MaskAccount:
    account = MaskAccount()
    for seconds in costs:
        account.spend(seconds, 1)
    return account


@given(st.lists(st.floats(0.0, limits.MASK_COST_S), max_size=300))
def test_a_grammar_within_its_time_never_ends_its_sequence(costs: list[float]) -> None:
    assert not spent(costs).is_exceeded


@given(st.lists(st.floats(0.0, limits.MASK_COST_S), max_size=100), st.floats(0.0, 1e6))
def test_neither_does_one_that_is_slow_a_few_times(costs: list[float], pause_s: float) -> None:
    account = spent(costs)
    for _ in range(3):
        account.spend(pause_s, 1)
        assert not account.is_exceeded


@given(COSTS, st.floats(1.5 * limits.MASK_COST_S, 10.0))
def test_one_whose_mean_is_above_its_time_does(before: list[float], slow_s: float) -> None:
    account, count = spent(before), 0
    while not account.is_exceeded:
        account.spend(slow_s, 1)
        count += 1
    assert count <= limits.MASK_EXCESS_S / (slow_s - limits.MASK_COST_S) + 4


def test_tokens_that_are_passed_on_together_count_each() -> None:
    account = MaskAccount()
    account.spend(100 * limits.MASK_COST_S, 100)
    assert account.excess_s == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 0.1), st.integers(0, 50)), max_size=60), st.floats(0.0, 0.1))
def test_each_has_one_turn_the_fast_ones_first_and_the_others_by_their_wait(
    found: list[tuple[float, int]], time_s: float
) -> None:
    accounts = [MaskAccount(estimate_s, num_waited=num_waited) for estimate_s, num_waited in found]
    order = in_turn(accounts, time_s)
    assert sorted(order) == list(range(len(accounts)))
    total_s, num_fast = 0.0, 0
    by_cost = sorted(account.estimate_s for account in accounts)
    while num_fast < len(by_cost) and (total_s := total_s + by_cost[num_fast]) <= time_s / 2:
        num_fast += 1
    if num_fast < len(order):
        waits = [accounts[one].num_waited for one in order[num_fast:]]
        assert waits == sorted(waits, reverse=True)
        assert [accounts[one].estimate_s for one in order[:num_fast]] == by_cost[:num_fast]


@pytest.mark.parametrize("seed", range(5))
def test_ordinary_grammars_never_wait_for_slow_ones_and_these_progress_in_turn(seed: int) -> None:
    """A model of many steps: 40 ordinary sequences among 128 slow ones, which are not ended here."""
    draw = random.Random(seed)
    costs = [draw.uniform(1e-5, 5e-5) for _ in range(40)] + [draw.uniform(1e-3, 1e-2) for _ in range(128)]
    accounts = [MaskAccount() for _ in costs]
    for _ in range(len(costs)):  # until each has been measured
        step(accounts, costs)
    longest_wait = 0
    for _ in range(500):
        took_s = step(accounts, costs)
        assert took_s <= STEP_S + max(costs)
        assert not any(account.num_waited for account in accounts[:40])
        longest_wait = max(longest_wait, *(account.num_waited for account in accounts))
    # In each step at least one of the slow ones has its turn.
    assert longest_wait <= 128


def step(accounts: list[MaskAccount], costs: list[float]) -> float:
    """Computes masks as a step does. Returns the time that it took."""
    took_s, served = 0.0, set[int]()
    for one in in_turn(accounts, STEP_S):
        if took_s >= STEP_S:
            break
        took_s += costs[one]
        served.add(one)
        accounts[one].spend(costs[one], 1)
    for one, account in enumerate(accounts):
        account.waited(one not in served)
    return took_s


class Time:
    """Clocks that are set by hand; `busy_s` passes on both, `away_s` while another program has the processor."""

    def __init__(self) -> None:
        self.clock_s = self.now_s = 100.0

    def passes(self, busy_s: float, away_s: float = 0.0) -> None:
        self.clock_s += busy_s
        self.now_s += busy_s + away_s


@given(st.lists(st.tuples(st.floats(0.0, 0.01), st.floats(0.0, 0.1)), max_size=30))
def test_a_stopwatch_counts_processor_time(parts: list[tuple[float, float]]) -> None:
    time = Time()
    watch = Stopwatch(lambda: time.clock_s, lambda: time.now_s)
    busy_s = 0.0
    for busy, away in parts:
        time.passes(busy, away)
        before_s = watch.total_s
        assert watch.read() >= before_s
        busy_s += busy
    # A short part counts with its duration, so that it may count too much, and the next long one too little.
    assert abs(watch.total_s - busy_s) <= SHORT_S * (len(parts) + 1)
