"""When a gateway that is told to refuses requests, because they would wait too long."""

import pytest

from antiphon.services.gateway.path.placement.queue_wait import ENDS_MIN, KNOWN_S, UNKNOWN_ROUNDS, QueueWait


def busy(per_second: float, seconds: float, start: float = 100.0) -> tuple[QueueWait, float]:
    """Sequences wait from `start` on, while others end at this rate."""
    wait = QueueWait()
    wait.look(1, start)
    for number in range(int(per_second * seconds)):
        wait.ended(start + (number + 1) / per_second)
    return wait, start + seconds


@pytest.mark.parametrize("seconds", [5.0, 60.0, 600.0])
@pytest.mark.parametrize("per_second", [2.0, 50.0])
def test_the_wait_is_the_queue_over_the_rate_since_there_is_a_queue(per_second: float, seconds: float):
    wait, now = busy(per_second, seconds)
    assert wait.estimate_s(int(10 * per_second), now) == pytest.approx(10, rel=0.25)
    assert wait.is_too_long(int(20 * per_second), 16, 10.0, now)
    assert not wait.is_too_long(int(5 * per_second), 16, 10.0, now)


def test_what_ended_while_nothing_waited_says_nothing():
    wait = QueueWait()
    for second in range(100):
        wait.ended(float(second))
    wait.look(40, 100.0)
    assert wait.estimate_s(40, 100.0) is None
    assert not wait.is_too_long(UNKNOWN_ROUNDS * 16 - 1, 16, 1.0, 100.0)
    assert wait.is_too_long(UNKNOWN_ROUNDS * 16, 16, 1.0, 100.0), "but not everything is taken until it is known"


def test_an_estimate_needs_time_and_ends():
    wait, now = busy(100.0, 0.9 * KNOWN_S)
    assert wait.estimate_s(10, now) is None
    wait, now = busy((ENDS_MIN - 1) / 10, 10.0)
    assert wait.estimate_s(10, now) is None


def test_an_empty_queue_begins_anew():
    wait, now = busy(10.0, 60.0)
    wait.look(0, now)
    assert wait.estimate_s(10, now) is None
    wait.look(3, now + 50)
    assert wait.estimate_s(10, now + 50 + KNOWN_S) is None
