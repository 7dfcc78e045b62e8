"""KV is read only while that takes less time than computing."""

import pytest

from antiphon.services.engine.core.kv.pace import FORGOTTEN, Pace


def test_reading_is_tried_until_both_are_known() -> None:
    pace = Pace()
    assert pace.reading_is_faster()
    pace.has_read(100, 10.0)
    assert pace.reading_is_faster()


def test_a_step_takes_the_time_since_the_step_before_it_ended() -> None:
    pace = Pace()
    pace.planned(1.0)
    pace.planned(1.1)
    pace.applied(100, 2.0)
    assert pace.compute_s == pytest.approx(0.01)
    pace.applied(100, 4.0)
    assert pace.compute_s == pytest.approx(0.8 * 0.01 + 0.2 * 0.02)
    pace.planned(100.0)
    pace.applied(63, 300.0)  # few tokens tell nothing
    assert pace.compute_s == pytest.approx(0.012)


@pytest.mark.matrix("K-02")
def test_a_slow_disk_is_not_used_and_tried_again_later() -> None:
    pace = Pace()
    pace.planned(0.0)
    pace.applied(100, 1.0)
    pace.has_read(100, 0.5)
    assert pace.reading_is_faster()
    for _ in range(20):
        pace.has_read(100, 2.0)
    assert not pace.reading_is_faster()
    refused = 1
    while not pace.reading_is_faster():
        refused += 1
    assert 30 < refused < 40
    assert pace.read_s <= pace.compute_s < pace.read_s / FORGOTTEN
