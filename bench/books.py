"""Who used the processor while something was measured, and measuring again when somebody else did.

On a machine of two cores one foreign busy thread halves a server, so a figure without these books says nothing. Called
by `bench.measure` and `bench.run`.
"""

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from antiphon.benchmark.client import Clock
from bench import processes

P = TypeVar("P")
T = TypeVar("T")
FOREIGN_CORES_MAX = 0.1


@dataclass(frozen=True, slots=True)
class Patience:
    """How hard to try for a measurement that nobody disturbs."""

    tries: int = 3
    idle_wait_s: float = 30.0
    """Longest wait for an idle machine before each try."""


HURRY = Patience(tries=1, idle_wait_s=0.0)
"""For a rehearsal."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds a second (cores): of this process, of the parts that were asked about, of everything else."""

    client: float
    parts: dict[str, float]
    foreign: float

    @property
    def noisy(self) -> bool:
        """Others used more than a measurement can bear."""
        return self.foreign > FOREIGN_CORES_MAX


def quietly(
    patience: Patience,
    parts: Callable[[], Mapping[str, float]],
    prepare: Callable[[], P],
    act: Callable[[P], T],
    clock: Clock = time.perf_counter,
) -> tuple[T, Cpu]:
    """Acts on an idle machine, and again while others come in between: the last try is kept, noisy or not.

    `prepare` comes before each try and is not booked; `act` gets what it gave.
    """
    tries = 0
    while True:
        processes.wait_idle(patience.idle_wait_s)
        prepared = prepare()
        value, cpu = booked(parts, lambda given=prepared: act(given), clock)
        tries += 1
        if not cpu.noisy or tries == patience.tries:
            return value, cpu


def booked(
    parts: Callable[[], Mapping[str, float]], act: Callable[[], T], clock: Clock = time.perf_counter
) -> tuple[T, Cpu]:
    """Acts once. `parts`: CPU seconds so far of each part whose use is to be told apart. By seconds of `clock`."""
    before, client, busy, started = dict(parts()), time.process_time(), processes.machine_busy_s(), clock()
    value = act()
    wall = clock() - started
    used = {name: (seconds - before.get(name, 0.0)) / wall for name, seconds in parts().items()}
    own = (time.process_time() - client) / wall
    return value, Cpu(own, used, (processes.machine_busy_s() - busy) / wall - own - sum(used.values()))


def children() -> dict[str, float]:
    """CPU seconds of the processes that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"children": used.ru_utime + used.ru_stime}
