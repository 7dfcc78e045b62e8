"""A turn: what the machine allowed before and after a load, and samples beside it."""

import pytest

from bench.harness import measure
from bench.harness.loads import LOADS
from bench.harness.sample import Sample
from bench.limits_of_machine import cpu_accounting, probe
from tests.unit.bench.test_roofline import SMALL

IDLE = cpu_accounting.Cpu(0.0, {}, 0.0)


def found(
    read: float, large: float, gemm: float, foreign: float = 0.0, by_sum: float = 1.0
) -> tuple[probe.Probe, cpu_accounting.Cpu]:
    return probe.Probe(read, large, by_sum, gemm), cpu_accounting.Cpu(0.0, {}, foreign)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The read rates that the machine shows, one after the other."""
    rates = [10.0, 30.0, 20.0]
    monkeypatch.setattr(measure, "limits", lambda *_: found(rates.pop(0), 1.0, 100.0))
    return rates


def test_limits_before_and_after_a_load_count_alike_and_are_measured_once_between_two_loads(measured: list[float]):
    wanted = [(0, LOADS[0]), (0, LOADS[1])]
    turns = [turn for turn, _ in measure.turns(wanted, SMALL, cpu_accounting.HURRY, 2, lambda _: [])]
    assert [turn.record()["read_model_gb_s"] for turn in turns] == [20.0, 25.0]
    assert [turn.load.name for turn in turns] == ["c1", "c8"]
    assert measured == []


def test_the_faster_of_both_buffers_bounds_reading():
    slow = measure.Turn(0, LOADS[0], SMALL, cpu_accounting.HURRY, (found(1.0, 2.0, 1e9), found(4.0, 1.0, 1e9)))
    fast = measure.Turn(0, LOADS[0], SMALL, cpu_accounting.HURRY, (found(6.0, 1.0, 1e9),))
    assert slow.floor.total_s == pytest.approx(2 * fast.floor.total_s)


def test_what_a_plain_sum_reads_makes_a_floor_of_its_own():
    found_limits = (found(8.0, 1.0, 1e9, by_sum=1.0), found(8.0, 1.0, 1e9, by_sum=3.0))
    turn = measure.Turn(0, LOADS[0], SMALL, cpu_accounting.HURRY, found_limits)
    assert turn.sum_floor.decode_s == pytest.approx(4 * turn.floor.decode_s)
    assert turn.floors == (turn.floor.total_s, turn.sum_floor.total_s)


def test_samples_are_put_beside_what_was_measured_on_both_sides_of_them():
    turn = measure.Turn(0, LOADS[0], SMALL, cpu_accounting.HURRY, (found(1.0, 1.0, 1e9),))
    sample = Sample(0, "c1", "antiphon", 7, 2.0, *turn.floors, 1.0, 100, 60, IDLE)
    after = turn.ended(found(3.0, 3.0, 1e9, foreign=0.5))
    assert after.record()["foreign_cores"] == 0.5
    assert [(s.floor_s, s.sum_floor_s) for s in after.settled([sample])] == [after.floors]
    assert after.floor.total_s == pytest.approx(turn.floor.total_s / 2)
