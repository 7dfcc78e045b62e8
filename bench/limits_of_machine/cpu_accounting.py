"""Accounts for CPU time during a measurement, and repeats a measurement that other programs disturbed.

On a machine with two cores, one busy thread of another program can halve the speed of a server, so a figure is
meaningful only together with this account. Called by `bench.harness.measure` and `bench.run`.
"""

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from antiphon.benchmark.load import Clock
from bench.limits_of_machine import processes

P = TypeVar("P")
T = TypeVar("T")
FOREIGN_CORES_MAX = 0.1


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often an undisturbed measurement is tried, and how long each try waits for an idle machine."""

    tries: int = 3
    idle_wait_s: float = 30.0
    """Longest wait in seconds for an idle machine before each try."""


HURRY = RetryPolicy(tries=1, idle_wait_s=0.0)
"""For a rehearsal: one try, without waiting."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU use in cores (CPU seconds per second): of this process, of named parts, and of all other programs."""

    client: float
    parts: dict[str, float]
    foreign: float

    @property
    def noisy(self) -> bool:
        """Whether other programs used more than `FOREIGN_CORES_MAX` cores."""
        return self.foreign > FOREIGN_CORES_MAX


def run_when_idle(
    retry_policy: RetryPolicy,
    parts: Callable[[], Mapping[str, float]],
    prepare: Callable[[], P],
    act: Callable[[P], T],
    clock: Clock = time.perf_counter,
) -> tuple[T, Cpu]:
    """Runs `act` on an idle machine and repeats it while other programs disturb it, up to `retry_policy.tries` times.

    Returns the value and CPU use of the last try, which may be disturbed. `prepare` runs before each try, outside the
    account; its result is passed to `act`. `parts` and `clock`: see `accounted`.
    """
    tries = 0
    while True:
        processes.wait_idle(retry_policy.idle_wait_s)
        prepared = prepare()
        value, cpu = accounted(parts, lambda given=prepared: act(given), clock)
        tries += 1
        if not cpu.noisy or tries == retry_policy.tries:
            return value, cpu


def accounted(
    parts: Callable[[], Mapping[str, float]], act: Callable[[], T], clock: Clock = time.perf_counter
) -> tuple[T, Cpu]:
    """Runs `act` once. Returns its value and the CPU use during the run.

    `parts` returns the CPU seconds used so far by each part that is accounted for separately. Wall time is measured
    with `clock`.
    """
    before, client, busy, started = dict(parts()), time.process_time(), processes.machine_busy_s(), clock()
    value = act()
    wall = clock() - started
    used = {name: (seconds - before.get(name, 0.0)) / wall for name, seconds in parts().items()}
    own = (time.process_time() - client) / wall
    return value, Cpu(own, used, (processes.machine_busy_s() - busy) / wall - own - sum(used.values()))


def children() -> dict[str, float]:
    """Returns the CPU seconds of child processes of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"children": used.ru_utime + used.ru_stime}
