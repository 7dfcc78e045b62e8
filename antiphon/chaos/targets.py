"""Finds the processes of a launcher in /proc, applies faults to them and verifies each effect. Linux only.

A fault whose effect cannot be verified fails the run: otherwise a fault that never happened would count as survived.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from antiphon.chaos import disk
from antiphon.chaos.schedule import DISK, Fault
from antiphon.shared import limits
from antiphon.shared.actors.standby import stands_by

T = TypeVar("T")
NATS = "nats"
SERVICES = "antiphon.services."
"""The package of a service's program, which its command line names."""
EFFECT_S = 5.0
"""Longest time from a signal to its verified effect, seconds."""
REPLACED_S = 60.0
"""Longest time from a kill until the launcher has started the process again, seconds."""
RUNNING_S = 60.0
"""Longest wait for a target that is being started again because of an earlier fault, seconds."""
POLL_S = 0.01
STOPPED_S = limits.DRAIN_S + 10.0
"""Longest time from SIGTERM to the end of a process, which finishes its work first, seconds."""
_DAMAGES = {"flip": disk.flip, "cut": disk.cut}
_ENDINGS = {"kill": (signal.SIGKILL, EFFECT_S), "stop": (signal.SIGTERM, STOPPED_S)}


@dataclass(frozen=True, slots=True)
class Target:
    """One process of a launcher. `name` stays the same when the launcher starts it again (`engine-2`)."""

    name: str
    service: str
    pid: int


@dataclass(slots=True)
class Injection:
    """A fault that was applied. Times are monotonic seconds; `problem` names the effect that could not be verified."""

    fault: Fault
    began_s: float
    ended_s: float = 0.0
    problem: str = ""

    @property
    def verified(self) -> bool:
        """Whether every effect of the fault was seen."""
        return not self.problem


def find_targets(launcher: int) -> dict[str, Target]:
    """Returns the running children of the process `launcher` that are services or the bus, by name.

    Standbys are left out.
    """
    found: dict[str, Target] = {}
    for path in _children(launcher):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) != launcher or state in "ZX":
                continue
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if stands_by(words, (path / "comm").read_text().strip()):
                continue
            target = _target(words, int(path.name))
            if target is not None:
                found[target.name] = target
    return found


def _children(launcher: int) -> list[Path]:
    """Returns the directories in /proc of a process's children; of all processes if the kernel has no list of children.

    This is called many times while a process is started again. Reading all of /proc each time would take the processor
    from the server and delay the streams, which the same event loop reads.
    """
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{launcher}/task").iterdir()
        return [Path("/proc", pid) for task in tasks for pid in (task / "children").read_text().split()]
    return list(Path("/proc").glob("[0-9]*"))


def _target(words: Sequence[str], pid: int) -> Target | None:
    if Path(words[0]).name == "nats-server":
        return Target(NATS, NATS, pid)
    ids = [word.partition("=")[2] for word in words if word.startswith("--service-id=")]
    modules = [word.removeprefix(SERVICES) for word in words if word.startswith(SERVICES)]
    return Target(ids[0], modules[0], pid) if ids and modules else None


class Injector:
    """Applies faults to the children of one launcher.

    `is_ready(name)` says whether the server reports the process with this name as ready. The effect of a kill lasts
    until the process that was started again is ready.
    """

    def __init__(self, launcher: int, is_ready: Callable[[str], bool]) -> None:
        self._launcher = launcher
        self._is_ready = is_ready
        self._busy: dict[str, asyncio.Lock] = {}
        self.active: list[Injection] = []

    async def apply(self, fault: Fault) -> Injection:
        """Applies one fault and returns when its effect has ended and its targets run again.

        Faults on different targets may overlap; a fault on a busy target waits. A frozen process is always continued,
        also if the caller is cancelled.
        """
        async with contextlib.AsyncExitStack() as stack:
            for name in fault.targets:
                await stack.enter_async_context(self._busy.setdefault(name, asyncio.Lock()))
            injection = Injection(fault, time.monotonic())
            try:
                pids = await self._running(fault.targets)
                injection.began_s = time.monotonic()
                self.active.append(injection)
                if fault.kind == "freeze":
                    await self._freeze(pids, fault.duration_s)
                elif fault.group == DISK:
                    await _fault_of_disk(fault, *pids.values())
                else:
                    await self._end(pids, *_ENDINGS[fault.kind])
            except _Unverified as error:
                injection.problem = str(error)
            injection.ended_s = time.monotonic()
            return injection

    async def _running(self, names: Sequence[str]) -> dict[str, int]:
        found = await _until(lambda: self._pids(names), RUNNING_S)
        if found is None:
            raise _Unverified(f"{' or '.join(names)} does not run")
        return found

    def _pids(self, names: Sequence[str]) -> dict[str, int] | None:
        targets = find_targets(self._launcher)
        there = all(name in targets and (targets[name].service == NATS or self._is_ready(name)) for name in names)
        return {name: targets[name].pid for name in names} if there else None

    async def _end(self, pids: dict[str, int], number: signal.Signals, within_s: float) -> None:
        for pid in pids.values():
            _send(pid, number)
        for name, pid in pids.items():
            if await _until(lambda pid=pid: process_state(pid) in ("", "Z"), within_s) is None:
                raise _Unverified(f"{name}: process {pid} lives after {number.name}")
        for name, pid in pids.items():
            if await _until(lambda name=name, pid=pid: self._replaced(name, pid), REPLACED_S) is None:
                raise _Unverified(f"{name} was not started again within {REPLACED_S:.0f} s")

    def _replaced(self, name: str, pid: int) -> bool:
        target = find_targets(self._launcher).get(name)
        return target is not None and target.pid != pid

    async def _freeze(self, pids: dict[str, int], duration_s: float) -> None:
        try:
            for pid in pids.values():
                _send(pid, signal.SIGSTOP)
            for name, pid in pids.items():
                if await _until(lambda pid=pid: set(thread_states(pid)) == {"T"}, EFFECT_S) is None:
                    raise _Unverified(f"{name}: process {pid} is not in state T after SIGSTOP")
            await asyncio.sleep(duration_s)
            for name, pid in pids.items():
                if set(thread_states(pid)) != {"T"}:
                    raise _Unverified(f"{name}: process {pid} did not stay in state T")
        finally:
            for pid in pids.values():
                with contextlib.suppress(_Unverified):
                    _send(pid, signal.SIGCONT)
        for name, pid in pids.items():
            if await _until(lambda pid=pid: "T" not in set(thread_states(pid)), EFFECT_S) is None:
                raise _Unverified(f"{name}: process {pid} does not run after SIGCONT")


async def _fault_of_disk(fault: Fault, pid: int) -> None:
    directory = disk.directory_of(pid)
    if directory is None:
        problem = f"process {pid} keeps no KV on a disk"
    elif fault.kind == "full":
        problem = await disk.fill(pid, fault.duration_s)
    elif fault.kind == "slow":
        problem = await asyncio.to_thread(disk.slow_down, directory, fault.duration_s)
    else:
        await _until(lambda: disk.has_blocks(directory), RUNNING_S)
        problem = await asyncio.to_thread(_DAMAGES[fault.kind], directory, fault.at_s)
    if problem:
        raise _Unverified(problem)


class _Unverified(Exception):
    """An effect of a fault was not seen."""


def process_state(pid: int) -> str:
    """Returns the state letter of a process (`R`, `S`, `T`, `Z`, …); the empty text if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def thread_states(pid: int) -> Iterator[str]:
    """Yields the state letter of each thread of a process; nothing if there is no such process."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise _Unverified(f"process {pid} ended before {number.name}") from None


async def _until(condition: Callable[[], T], timeout_s: float) -> T | None:
    """Returns the first true value of `condition`, or None after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(POLL_S)
    return value
