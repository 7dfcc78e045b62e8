"""The schedule of faults, derived from the seed, the duration and the names of the processes. Pure.

`make_schedule` draws all kinds of faults by default; `only` limits them to some kinds and groups.
"""

import math
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["kill", "freeze", "stop", "flip", "cut", "full", "slow", "none"]
"""`stop`: ended with SIGTERM, as in a rolling update, and started again. `flip`, `cut`, `full`, `slow`: see `disk`.
`none`: a moment without a fault; it is not part of a schedule."""
ALL_GATEWAYS = "all gateways"
"""Group of the faults that hit every gateway at once."""
DISK = "kv disk"
"""Group of the faults of the disk on which an engine keeps KV."""
LASTING: tuple[FaultKind, ...] = ("full", "slow")
"""Those of them that last for some time, as a freeze does."""
EVERY_S = 2.5
"""Mean time between the beginnings of two faults, seconds."""
SPREAD = (0.4, 1.6)
"""Bounds of the random time between two faults, as shares of the mean."""
FREEZE_S = (0.2, 8.0)
"""Bounds of the duration of a freeze, seconds; its logarithm is uniform, so that it is often shorter than a lease."""
KILLS_MAX, KILL_WINDOW_S = 14, 600.0
"""Most kills and stops of one process in a window of this many seconds: the launcher gives it up after 20 crashes."""
QUIET_KILL_S = 12.0
"""Least time between two kills or stops of one process, seconds: so that the second one hits a process that has
recovered.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `at_s`: seconds since the start; `duration_s`: 0 for a fault of a moment.

    `group` is the service of the target, or `ALL_GATEWAYS`; `targets` has the names of the processes.
    """

    at_s: float
    kind: FaultKind
    group: str
    targets: tuple[str, ...]
    duration_s: float = 0.0


def make_schedule(
    seed: int,
    duration_s: float,
    processes: Mapping[str, Sequence[str]],
    every_s: float = EVERY_S,
    only: Collection[tuple[str, str]] = (),
    disks: Sequence[str] = (),
) -> list[Fault]:
    """Returns the faults of a run, in the order of their times.

    `processes` has the names of the processes of each service; `every_s` is the mean time between two faults. Every
    combination of kind and group occurs once before any occurs again, in random order. A kill or stop that would come
    too early after another one of the same process becomes a freeze. `only`, if not empty: the only pairs of kind and
    group that occur; a kill or stop that would come too early is then left out. `disks`: the engines that keep KV on a
    disk.
    """
    chance = random.Random(seed)
    kills: dict[str, deque[float]] = {name: deque() for names in processes.values() for name in names}
    faults: list[Fault] = []
    now = every_s * chance.uniform(*SPREAD)
    for kind, group in _combinations(chance, processes, only, has_disks=bool(disks)):
        if now >= duration_s:
            return faults
        if group == ALL_GATEWAYS:
            targets = tuple(processes["gateway"])
        else:
            targets = (chance.choice(disks if group == DISK else processes[group]),)
        length_s = math.exp(chance.uniform(*map(math.log, FREEZE_S)))
        if group == DISK:
            length_s = length_s if kind in LASTING else 0.0
            faults.append(Fault(at_s=now, kind=kind, group=group, targets=targets, duration_s=length_s))
        elif kind != "freeze" and all(_may_kill(kills[name], now) for name in targets):
            for name in targets:
                kills[name].append(now)
            faults.append(Fault(at_s=now, kind=kind, group=group, targets=targets))
        elif kind == "freeze" or not only:
            faults.append(Fault(at_s=now, kind="freeze", group=group, targets=targets, duration_s=length_s))
        now += every_s * chance.uniform(*SPREAD)
    return faults


def _combinations(
    chance: random.Random,
    processes: Mapping[str, Sequence[str]],
    only: Collection[tuple[str, str]],
    *,
    has_disks: bool,
) -> Iterator[tuple[FaultKind, str]]:
    kinds: tuple[FaultKind, ...] = ("kill", "freeze", "stop")
    groups = sorted(processes)
    if len(processes.get("gateway", ())) > 1:
        groups.append(ALL_GATEWAYS)
    of_disk: tuple[FaultKind, ...] = ("flip", "cut", *LASTING) if has_disks else ()
    every: list[tuple[FaultKind, str]] = [(kind, group) for group in groups for kind in kinds]
    every.extend((kind, DISK) for kind in of_disk)
    every = [(kind, group) for kind, group in every if not only or (kind, group) in only]
    while every:
        chance.shuffle(every)
        yield from every


def _may_kill(times: deque[float], now: float) -> bool:
    while times and times[0] <= now - KILL_WINDOW_S:
        times.popleft()
    return len(times) < KILLS_MAX and (not times or now - times[-1] >= QUIET_KILL_S)
