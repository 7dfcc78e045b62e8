"""The bare work of a load: how often it is done, and the process that does it."""

from bench import bare
from bench.roofline import Work


def test_a_part_of_a_call_counts_as_a_part_of_its_time() -> None:
    times = iter([0.0, 6.0, 0.0, 2.0])
    calls: list[int] = []
    assert bare.seconds_of(lambda: calls.append(1), 3.25, lambda: next(times)) == 6.0 * 3.25 / 3
    assert len(calls) == 3
    assert bare.seconds_of(lambda: calls.append(1), 0.25, lambda: next(times)) == 0.5
    assert len(calls) == 4


def test_a_process_of_its_own_reads_and_multiplies() -> None:
    size = 8 * 2**20
    assert bare.measure(Work(bytes=40 * size, operations=10**9), size, 4, 1) > 0
    assert bare.measure(Work(bytes=0, operations=10**9), size, 4, 1) > 0
