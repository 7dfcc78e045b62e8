"""Who used the processor: real processes counted, stopped and continued; a noisy measurement taken again."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.limits_of_machine import cpu_accounting, processes

SPIN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}])"


RETRY_POLICY = cpu_accounting.RetryPolicy(tries=3, idle_wait_s=0.0)


@pytest.fixture
def spinning() -> Iterator[int]:
    """A process that waits for its child, which keeps a core busy."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT])
    try:
        wait(lambda: len(processes.tree(parent.pid)) == 2 and used(parent.pid) > 0.05)
        yield parent.pid
    finally:
        processes.kill(parent.pid)
        parent.wait()


def wait(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def used(pid: int) -> float:
    return sum(process.cpu_s for process in processes.tree(pid))


def states(pid: int) -> set[str]:
    """States of the tree's processes; one that ends between the list and the reading of its state has none."""
    found = set()
    for process in processes.tree(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0])
    return found


def test_a_paused_tree_uses_nothing_until_it_goes_on(spinning: int) -> None:
    processes.pause(spinning)
    wait(lambda: states(spinning) == {"T"})
    before = used(spinning)
    time.sleep(0.1)  # not to wait for something: this is the time in which nothing may happen
    assert used(spinning) == before
    processes.resume(spinning)
    wait(lambda: used(spinning) > before)


def test_the_use_of_a_child_is_booked_to_its_part_and_not_to_others(spinning: int) -> None:
    def act() -> str:
        before = used(spinning)
        wait(lambda: used(spinning) > before + 0.5)  # the system counts in hundredths of a second
        return "done"

    value, cpu = cpu_accounting.accounted(lambda: {"child": used(spinning)}, act)
    assert value == "done"
    assert 0 < cpu.parts["child"] <= 1.1
    assert cpu.client < 0.9


def test_what_is_neither_client_nor_part_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, parts = iter([100.0, 104.0]), iter([{"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 5.5}])
    monkeypatch.setattr(processes, "machine_busy_s", lambda: next(busy))
    _, cpu = cpu_accounting.accounted(lambda: next(parts), lambda: time.sleep(0.01))
    assert cpu.parts["a"] == pytest.approx(2 * cpu.parts["b"])
    assert cpu.client + cpu.foreign == pytest.approx(2.5 * cpu.parts["a"])


def test_what_a_parent_left_behind_is_ended_and_nobody_else(spinning: int) -> None:
    family = processes.tree(spinning)
    parent, child = family
    stale = processes.Process(child.pid, 1, 0.0, 0.0, "", child.started + 1)
    processes.end_orphans([stale])
    assert len(processes.tree(spinning)) == 2
    processes.end_orphans([child])
    wait(lambda: len(processes.tree(parent.pid)) == 0 or states(parent.pid) == {"Z"})


def test_a_noisy_measurement_is_taken_again_with_a_new_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 5.0, 5.0, 5.0])
    monkeypatch.setattr(processes, "wait_idle", lambda limit_s: True)
    monkeypatch.setattr(processes, "machine_busy_s", lambda: next(busy))
    numbers = iter(range(9))
    value, cpu = cpu_accounting.run_when_idle(
        RETRY_POLICY, dict, lambda: next(numbers), lambda number: (number, time.sleep(0.01))[0]
    )
    assert value == 1
    assert not cpu.noisy


def test_after_the_last_try_a_noisy_measurement_is_kept_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter(range(0, 100, 5))
    monkeypatch.setattr(processes, "wait_idle", lambda limit_s: False)
    monkeypatch.setattr(processes, "machine_busy_s", lambda: float(next(busy)))
    numbers = iter(range(9))
    value, cpu = cpu_accounting.run_when_idle(RETRY_POLICY, dict, lambda: next(numbers), lambda number: number)
    assert value == RETRY_POLICY.tries - 1
    assert cpu.noisy
