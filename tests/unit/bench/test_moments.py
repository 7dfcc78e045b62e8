"""A load that stands still while the machine is measured, and the clock that stands still with it."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.limits_of_machine import moments, processes

SIZE = 8 * 2**20


def start() -> moments.Moments:
    return moments.Moments(SIZE, 1, every_s=0.05)


@pytest.fixture(scope="module")
def taken() -> Iterator[moments.Moments]:
    with start() as handle:
        yield handle


@pytest.fixture
def spinning() -> Iterator[int]:
    """A process that counts."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield child.pid
    child.kill()
    child.wait()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def test_a_load_stands_still_while_the_machine_is_measured_and_goes_on(
    taken: moments.Moments, spinning: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, float]] = []
    measured = threading.Event()
    ask = taken._ask

    def look() -> dict[str, float]:
        before, found = taken.clock(), ask()
        seen.append((state(spinning), taken.clock() - before))
        measured.set()
        return found

    monkeypatch.setattr(taken, "_ask", look)
    with taken.of(spinning):
        measured.wait()
    assert seen
    assert all(each == ("T", 0.0) for each in seen)
    assert state(spinning) != "T"
    assert taken.limits().read_bytes > 1e6
    assert taken.limits().operations > 1e6


def test_the_clock_leaves_out_what_a_load_stood_still(taken: moments.Moments, spinning: int) -> None:
    # The clock is read within the interval that `wall` measures: this process may be descheduled between two reads.
    began = time.perf_counter()
    before = taken.clock()
    with taken.of(spinning):
        time.sleep(0.5)
    load = taken.clock() - before
    wall = time.perf_counter() - began
    assert 0 < load < wall


def test_the_processor_time_of_measuring_is_counted(taken: moments.Moments, spinning: int) -> None:
    # The kernel counts in ticks of 10 ms, and one measurement may take less.
    used, deadline = taken.cpu_s(), time.perf_counter() + 30
    while taken.cpu_s() == used and time.perf_counter() < deadline:
        with taken.of(spinning):
            time.sleep(0.2)
    assert taken.cpu_s() > used


def test_a_load_shorter_than_the_interval_has_a_moment_too(taken: moments.Moments, spinning: int) -> None:
    with taken.of(spinning):
        pass
    assert taken.limits().read_bytes > 0


def test_a_program_that_has_ended_is_not_silent(spinning: int) -> None:
    with start() as taken:
        processes.kill(taken._process.pid)
        taken._process.wait()
        with pytest.raises(SystemExit, match="measuring program"), taken.of(spinning):
            time.sleep(0.2)
    assert state(spinning) != "T"


def test_the_average_is_of_times_not_of_rates_and_one_slow_multiplication_does_not_count(
    taken: moments.Moments,
) -> None:
    taken._found = [moments.Moment(1e-9, 1e-12), moments.Moment(3e-9, 1e-12), moments.Moment(2e-9, 9e-12)]
    assert taken.limits().read_bytes == pytest.approx(0.5e9)
    assert taken.limits().operations == pytest.approx(1e12)
