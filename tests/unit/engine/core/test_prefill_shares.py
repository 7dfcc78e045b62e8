"""How a step's prompt tokens are divided between clients."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.policy.prefill_shares import divide
from tests.unit.engine.core.factories import make_core, prompt_of, shares, spec, step


@pytest.mark.parametrize(
    ("budget", "demands", "given_tokens"),
    [
        (64, {"a": 1000, "b": 1000}, {"a": 32, "b": 32}),
        (64, {"a": 1000, "b": 10}, {"a": 54, "b": 10}),
        (64, {"a": 20, "b": 10}, {"a": 20, "b": 10}),
        (64, {"a": 99, "b": 99, "c": 4}, {"a": 30, "b": 30, "c": 4}),
        (1, {"a": 99, "b": 99}, {"a": 1, "b": 1}),
        (-3, {"a": 99}, {"a": 1}),
    ],
)
def test_equal_shares_and_what_one_leaves_goes_to_the_others(budget, demands, given_tokens) -> None:
    assert divide(budget, demands) == given_tokens


@given(st.integers(1, 5000), st.dictionaries(st.text("abcdef", max_size=2), st.integers(1, 5000), min_size=1))
def test_nothing_is_wasted_and_nobody_is_left_out(budget: int, demands: dict[str, int]) -> None:
    found = divide(budget, demands)
    assert set(found) == set(demands)
    assert all(1 <= found[client] <= demands[client] for client in demands)
    if budget >= len(demands):
        assert min(budget, sum(demands.values())) - len(demands) <= sum(found.values()) <= budget
    unmet = [client for client in demands if found[client] < demands[client]]
    assert all(found[client] <= 1 + min((found[other] for other in unmet), default=budget) for client in demands)


def add(core: Core, client: str, length: int) -> None:
    core.add(dataclasses.replace(spec(client or "none", prompt_of(length)), client=client))


@pytest.mark.parametrize(("others", "client"), [("a", "b"), ("", "b"), ("a", "")])
def test_a_short_prompt_does_not_wait_for_a_long_one_of_another_client(others: str, client: str) -> None:
    core = make_core(num_blocks=256, budget=16, caching=False, max_model_len=1000)
    add(core, others, 160)
    assert shares(step(core)[0]) == [(0, 0, 16, False)]
    add(core, client, 20)
    if client:
        assert shares(step(core)[0]) == [(0, 16, 8, False), (1, 0, 8, False)]
        assert shares(step(core)[0]) == [(0, 24, 8, False), (1, 8, 8, False)]
        assert shares(step(core)[0]) == [(0, 32, 12, False), (1, 16, 4, True)]
        assert shares(step(core)[0]) == [(0, 44, 15, False), (1, 20, 1, True)]
    else:
        assert shares(step(core)[0]) == [(0, 16, 16, False)], "a sequence without a client waits for its turn"


def test_one_client_or_none_has_the_whole_budget() -> None:
    for client in ("", "a"):
        core = make_core(num_blocks=256, budget=16, caching=False, max_model_len=1000)
        core.add(dataclasses.replace(spec("long", prompt_of(160)), client=client))
        step(core)
        core.add(dataclasses.replace(spec("short", prompt_of(4)), client=client))
        assert shares(step(core)[0]) == [(0, 16, 16, False)]
