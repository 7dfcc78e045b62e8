"""Faults on real processes: what counts as an effect, and that a missing effect is noticed."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable

import pytest

from antiphon.chaos import targets
from antiphon.chaos.schedule import Fault
from antiphon.chaos.targets import Injector, find_targets, process_state
from antiphon.shared.actors.standby import ACTIVE, MODULE

IDLE = "import time; time.sleep(60)"
LAUNCHER = """
import subprocess, sys, time
MODULE = "antiphon.services.engine"
def start(): return subprocess.Popen([sys.executable, "-c", {idle!r}, MODULE, "--service-id=engine-1"])
child = start()
while True:
    if child.poll() is not None and {restarts}: child = start()
    time.sleep(0.01)
"""


@contextlib.asynccontextmanager
async def _launcher(*, restarts: bool) -> AsyncIterator[int]:
    """The process id of a launcher with one engine."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER.format(idle=IDLE, restarts=restarts), start_new_session=True
    )
    try:
        await _until(lambda: "engine-1" in find_targets(process.pid))
        yield process.pid
    finally:
        children = find_targets(process.pid).values()
        process.kill()
        await process.wait()
        for child in children:
            os.kill(child.pid, signal.SIGKILL)


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def _fault(kind, duration_s: float = 0.0) -> Fault:
    return Fault(at_s=0.0, kind=kind, group="engine", targets=("engine-1",), duration_s=duration_s)


async def test_only_the_children_of_the_launcher_are_looked_at_if_the_kernel_lists_them():
    async with _launcher(restarts=True) as launcher:
        assert [path.name for path in targets._children(launcher)] == [str(find_targets(launcher)["engine-1"].pid)]


async def test_a_standby_is_no_target_until_it_is_active():
    code = f"import sys; sys.stdin.readline(); open('/proc/self/comm', 'w').write({ACTIVE!r}); {IDLE}"
    argv = [sys.executable, "-c", code, MODULE, "json", "antiphon.services.engine", "--service-id=engine-1"]
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.PIPE)
    try:
        assert "engine-1" not in find_targets(os.getpid())
        assert process.stdin is not None
        process.stdin.write(b"\n")
        await _until(lambda: "engine-1" in find_targets(os.getpid()))
    finally:
        process.kill()
        await process.wait()


def test_without_that_list_all_processes_are_looked_at():
    assert str(os.getpid()) in [path.name for path in targets._children(-1)]


async def test_a_kill_ends_when_the_process_has_been_started_again():
    async with _launcher(restarts=True) as launcher:
        before = find_targets(launcher)["engine-1"].pid
        injection = await Injector(launcher, lambda _: True).apply(_fault("kill"))
        assert injection.verified, injection.problem
        assert process_state(before) in ("", "Z")
        assert find_targets(launcher)["engine-1"].pid != before


async def test_a_kill_without_a_successor_is_not_verified(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "REPLACED_S", 0.3)
    async with _launcher(restarts=False) as launcher:
        injection = await Injector(launcher, lambda _: True).apply(_fault("kill"))
        assert "not started again" in injection.problem


async def test_a_frozen_process_stands_still_and_goes_on():
    async with _launcher(restarts=True) as launcher:
        pid = find_targets(launcher)["engine-1"].pid
        applying = asyncio.create_task(Injector(launcher, lambda _: True).apply(_fault("freeze", 0.5)))
        await _until(lambda: process_state(pid) == "T" or applying.done())
        injection = await applying
        assert injection.verified, injection.problem
        await _until(lambda: process_state(pid) in ("R", "S"))


async def test_a_process_that_is_continued_too_early_is_noticed():
    async with _launcher(restarts=True) as launcher:
        pid = find_targets(launcher)["engine-1"].pid
        applying = asyncio.create_task(Injector(launcher, lambda _: True).apply(_fault("freeze", 2.0)))
        await _until(lambda: process_state(pid) == "T")
        os.kill(pid, signal.SIGCONT)
        # It may be continued before or after the injector has seen that it stands still.
        problem = (await applying).problem
        assert "did not stay in state T" in problem or "is not in state T" in problem


async def test_a_target_that_is_not_there_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "RUNNING_S", 0.2)
    async with _launcher(restarts=True) as launcher:
        assert "does not run" in (await Injector(launcher, lambda _: False).apply(_fault("kill"))).problem
