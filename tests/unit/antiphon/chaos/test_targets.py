"""Faults on real processes: what counts as an effect, and that a missing effect is noticed."""

import asyncio
import os
import signal
import sys
import time

import pytest

from antiphon.chaos import targets
from antiphon.chaos.schedule import Fault
from antiphon.chaos.targets import Injector, find_targets, process_state

IDLE = "import time; time.sleep(60)"
LAUNCHER = """
import subprocess, sys, time
def start(): return subprocess.Popen([sys.executable, "-c", {idle!r}, "services.engine", "--service-id=engine-1"])
child = start()
while True:
    if child.poll() is not None and {restarts}: child = start()
    time.sleep(0.01)
"""


async def _launcher(restarts: bool) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER.format(idle=IDLE, restarts=restarts), start_new_session=True
    )
    deadline = time.monotonic() + 10
    while "engine-1" not in find_targets(process.pid):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return process


async def _end(launcher: asyncio.subprocess.Process) -> None:
    children = find_targets(launcher.pid).values()
    launcher.kill()
    await launcher.wait()
    for child in children:
        os.kill(child.pid, signal.SIGKILL)


def _fault(kind, duration_s: float = 0.0) -> Fault:
    return Fault(0.0, kind, "engine", ("engine-1",), duration_s)


async def test_a_kill_ends_when_the_process_has_been_started_again():
    launcher = await _launcher(True)
    try:
        before = find_targets(launcher.pid)["engine-1"].pid
        injection = await Injector(launcher.pid, lambda _: True).apply(_fault("kill"))
        assert injection.verified, injection.problem
        assert process_state(before) in ("", "Z")
        assert find_targets(launcher.pid)["engine-1"].pid != before
    finally:
        await _end(launcher)


async def test_a_kill_without_a_successor_is_not_verified(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "REPLACED_S", 0.3)
    launcher = await _launcher(False)
    try:
        injection = await Injector(launcher.pid, lambda _: True).apply(_fault("kill"))
        assert "not started again" in injection.problem
    finally:
        await _end(launcher)


async def test_a_frozen_process_stands_still_and_goes_on():
    launcher = await _launcher(True)
    try:
        pid = find_targets(launcher.pid)["engine-1"].pid
        applying = asyncio.create_task(Injector(launcher.pid, lambda _: True).apply(_fault("freeze", 0.3)))
        await asyncio.sleep(0.15)
        assert process_state(pid) == "T"
        injection = await applying
        assert injection.verified, injection.problem
        assert process_state(pid) in ("R", "S")
    finally:
        await _end(launcher)


async def test_a_process_that_is_continued_too_early_is_noticed():
    launcher = await _launcher(True)
    try:
        pid = find_targets(launcher.pid)["engine-1"].pid
        applying = asyncio.create_task(Injector(launcher.pid, lambda _: True).apply(_fault("freeze", 0.4)))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGCONT)
        assert "did not stay in state T" in (await applying).problem
    finally:
        await _end(launcher)


async def test_a_target_that_is_not_there_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "RUNNING_S", 0.2)
    launcher = await _launcher(True)
    try:
        assert "does not run" in (await Injector(launcher.pid, lambda _: False).apply(_fault("kill"))).problem
    finally:
        await _end(launcher)
