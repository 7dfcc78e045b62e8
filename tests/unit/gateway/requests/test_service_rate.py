"""The measured time after which a refused client may come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.path.placement.queue_wait import RATE_KNOWN_S, RATE_WINDOW_S, WAIT_S, ServiceRate


def served(per_second: float, seconds: float, start: float = 1000.0) -> tuple[ServiceRate, float]:
    rate, count = ServiceRate(), int(per_second * seconds)
    for number in range(count):
        rate.ended(start + number / per_second)
    return rate, start + seconds


def test_nothing_is_known_before_the_first_end():
    assert ServiceRate().wait_s(1000, 5.0) == WAIT_S[0]


@pytest.mark.parametrize("per_second", [0.5, 4.0, 200.0])
@pytest.mark.parametrize("seconds", [3 * RATE_WINDOW_S, 20 * RATE_WINDOW_S])
def test_the_wait_is_the_queue_over_the_rate(per_second: float, seconds: float):
    rate, now = served(per_second, seconds)
    assert rate.per_second(now) == pytest.approx(per_second, rel=0.15)
    assert rate.wait_s(int(per_second * 20), now) == pytest.approx(20, rel=0.3)


def test_a_young_rate_is_not_underestimated():
    rate, now = served(10.0, 2.0)
    assert rate.per_second(now) == pytest.approx(10, rel=0.2)


def test_a_rate_follows_a_change():
    rate, now = served(100.0, 60.0)
    for number in range(60):
        rate.ended(now + number)
    assert rate.per_second(now + 60) == pytest.approx(1, rel=0.3)
    assert rate.wait_s(10, now + 2000) == WAIT_S[0], "idle: nothing is known any more"


@pytest.mark.parametrize("silence_s", [RATE_WINDOW_S * 5, WAIT_S[1], RATE_KNOWN_S])
def test_a_service_that_has_become_slow_asks_for_the_longest_wait(silence_s: float):
    rate, now = served(10.0, 60.0)
    asked = now
    while asked + 5 < now + silence_s - 1:
        asked += 5
        waited = rate.wait_s(20, asked)
    assert waited == WAIT_S[1]
    slow, now = served(1 / 120, 600.0)
    assert slow.wait_s(10, now + 100) == WAIT_S[1]


@given(st.floats(0.01, 1000), st.integers(0, 10**6))
def test_the_wait_is_bounded(per_second: float, waiting: int):
    rate, now = served(per_second, 5.0)
    assert WAIT_S[0] <= rate.wait_s(waiting, now) <= WAIT_S[1]
