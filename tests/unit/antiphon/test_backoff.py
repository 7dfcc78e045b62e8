"""Restarting what has crashed, more slowly each time, and giving up."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.supervision.fleet import Backoff


def test_the_wait_doubles_up_to_its_maximum():
    backoff = Backoff(first_s=0.1, max_s=1.0, crashes_max=6, window_s=60)
    assert [backoff.crashed(0.0) for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, None]


def test_crashes_older_than_the_window_are_forgotten():
    backoff = Backoff(first_s=0.1, crashes_max=2, window_s=10)
    assert [backoff.crashed(now) for now in (0, 1, 11, 30)] == [0.1, 0.2, 0.1, 0.1]


@given(st.lists(st.sampled_from([0.0, 1.0, 7.0, 25.0]), max_size=30), st.integers(1, 5))
def test_it_gives_up_exactly_when_the_window_holds_too_many(gaps, crashes_max):
    backoff, now, times = Backoff(crashes_max=crashes_max, window_s=20.0), 0.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        recent = [at for at in times if at > now - 20.0]
        assert (backoff.crashed(now) is None) == (len(recent) > crashes_max)
