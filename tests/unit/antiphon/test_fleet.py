"""Supervision with real child processes: restarts, giving up, stopping, output, and no orphans."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.supervision.fleet import CONFIGURATION_ERROR, CRASHES_MAX, Failure, Fleet, RestartPolicy, describe
from antiphon.supervision.processes import LINE_BYTES_MAX, ChildSpec, Lines

SLEEPER = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
)
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"

WAITS = "import sys; sys.stdin.readline(); "
TELLS_PID = STUBBORN.replace("'up'", "__import__('os').getpid()")
LAUNCHER = """
import asyncio, sys
from antiphon.supervision.fleet import Fleet
from antiphon.supervision.processes import ChildSpec

async def main():
    fleet = Fleet(lambda name, line: print(line, flush=True))
    fleet.start([ChildSpec(name=name, service=name, argv=[sys.executable, "-c", sys.argv[1]]) for name in "ab"])
    await fleet.failed

asyncio.run(main())
"""


class Output:
    """Collects lines and lets a test wait for one."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._changed.set()

    async def until(self, wanted: Callable[[list[tuple[str, str]]], bool]) -> None:
        async with asyncio.timeout(60):
            while not wanted(self.lines):
                self._changed.clear()
                await self._changed.wait()

    async def until_up(self, name: str, times: int = 1) -> None:
        await self.until(lambda lines: lines.count((name, "up")) >= times)


@pytest.fixture
def output() -> Output:
    return Output()


@pytest.fixture
async def fleet(output: Output) -> AsyncIterator[Fleet]:
    made = Fleet(output)
    yield made
    made.kill()
    await made.stop({"a", "b", "c"}, 5)


def spec(name: str, code: str, **more: Any) -> ChildSpec:
    return ChildSpec(name=name, service=name[0], argv=[sys.executable, "-c", code], **more)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


async def test_a_killed_child_is_started_again(fleet: Fleet, output: Output) -> None:
    fleet.start([spec("a", SLEEPER)])
    await output.until_up("a")
    first = fleet.pids()["a"]
    os.kill(first, signal.SIGKILL)
    await output.until_up("a", 2)
    assert fleet.pids()["a"] != first
    assert any("SIGKILL" in line for name, line in output.lines if name == "antiphon")


async def test_that_a_child_has_ended_is_told_at_once_unless_it_was_stopped(fleet: Fleet, output: Output) -> None:
    ended = asyncio.Queue[str]()
    fleet.on_end = lambda spec: ended.put_nowait(spec.member_id)
    fleet.start([spec("a", SLEEPER, member_id="one"), spec("b", SLEEPER, member_id="two")])
    await output.until_up("a")
    await output.until_up("b")
    await fleet.stop({"b"}, 5)
    os.kill(fleet.pids()["a"], signal.SIGKILL)
    assert await asyncio.wait_for(ended.get(), 60) == "one"
    assert ended.empty()


async def test_a_child_with_a_running_replica_leaves_it_the_processor_first(
    fleet: Fleet, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.supervision.fleet.REPLICAS_S", 3600.0)
    fleet.start([spec("a-1", SLEEPER), spec("a-2", SLEEPER), spec("b", SLEEPER)])
    for name in ("a-1", "a-2", "b"):
        await output.until_up(name)
    pids = fleet.pids()
    os.kill(pids["a-1"], signal.SIGKILL)
    os.kill(pids["b"], signal.SIGKILL)
    await output.until_up("b", 2)  # one without replicas is started at once
    assert ("antiphon", "a-1 ended (SIGKILL); it starts again in 3600.0 s") in output.lines
    assert "a-1" not in fleet.pids()
    os.kill(pids["a-2"], signal.SIGKILL)
    await output.until_up("a-1", 2)  # without a running replica it does not wait any longer
    await output.until_up("a-2", 2)


async def test_a_child_of_another_model_is_no_replica(
    fleet: Fleet, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.supervision.fleet.REPLICAS_S", 3600.0)
    fleet.start([spec("a-1", SLEEPER, model="one"), spec("a-2", SLEEPER, model="two")])
    await output.until_up("a-1")
    os.kill(fleet.pids()["a-1"], signal.SIGKILL)
    await output.until_up("a-1", 2)


async def test_a_stopped_replica_is_not_waited_for(
    fleet: Fleet, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.supervision.fleet.REPLICAS_S", 3600.0)
    fleet.start([spec("a-1", SLEEPER), spec("a-2", SLEEPER)])
    await output.until_up("a-1")
    await output.until_up("a-2")
    stopped = fleet.pids()["a-2"]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    os.kill(fleet.pids()["a-1"], signal.SIGKILL)
    await output.until_up("a-1", 2)
    os.kill(stopped, signal.SIGCONT)


async def until_it_stands_by(fleet: Fleet, index: int = 0) -> int:
    """Returns the process id of a child's standby when it waits for its line."""
    member = fleet._members[index]
    async with asyncio.timeout(60):
        while member.standby is None or member.standby.pid == 0:
            await asyncio.sleep(0.01)
    return member.standby.pid


async def test_a_standby_takes_the_place_of_a_child_that_ends(
    fleet: Fleet, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.supervision.fleet.STANDBY_AFTER_S", 0.0)
    fleet.start([spec("a", SLEEPER, standby_argv=[sys.executable, "-c", WAITS + SLEEPER])])
    await output.until_up("a")
    standby = await until_it_stands_by(fleet)
    os.kill(fleet.pids()["a"], signal.SIGKILL)
    await output.until_up("a", 2)
    assert fleet.pids()["a"] == standby
    assert await until_it_stands_by(fleet) != standby  # the next one
    os.kill(standby, signal.SIGKILL)
    await output.until_up("a", 3)


async def test_without_its_standby_a_child_is_started_as_usual(
    fleet: Fleet, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.supervision.fleet.STANDBY_AFTER_S", 0.0)
    fleet.start([spec("a", SLEEPER, standby_argv=[sys.executable, "-c", WAITS])])
    await output.until_up("a")
    standby = await until_it_stands_by(fleet)
    os.kill(standby, signal.SIGKILL)
    wait_until(lambda: not alive(standby))
    os.kill(fleet.pids()["a"], signal.SIGKILL)
    await output.until_up("a", 2)
    assert fleet.pids()["a"] != standby


async def test_a_standby_ends_with_its_child(fleet: Fleet, output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.supervision.fleet.STANDBY_AFTER_S", 0.0)
    fleet.start([spec("a", SLEEPER, standby_argv=[sys.executable, "-c", WAITS])])
    await output.until_up("a")
    standby = await until_it_stands_by(fleet)
    await fleet.stop({"a"}, 5)
    assert not alive(standby)


async def test_a_configuration_error_is_not_tried_again(fleet: Fleet, output: Output) -> None:
    fleet.start([spec("a", "print('--port: impossible'); raise SystemExit(78)"), spec("b", SLEEPER)])
    failure = await asyncio.wait_for(fleet.failed, 60)
    assert failure.exit_code == CONFIGURATION_ERROR
    assert "a refused its configuration" in failure.message
    assert output.lines.count(("a", "--port: impossible")) == 1


@pytest.mark.matrix("R-15")
async def test_a_child_that_cannot_stay_up_is_given_up(fleet: Fleet, output: Output) -> None:
    fleet.start([spec("a", "print('broken'); raise SystemExit(3)")])
    failure = await asyncio.wait_for(fleet.failed, 20)
    assert failure.exit_code == 1
    assert "exit code 3" in failure.message
    assert 2 <= output.lines.count(("a", "broken")) <= 10


async def test_a_model_whose_last_process_is_given_up_is_told(fleet: Fleet, output: Output) -> None:
    fleet.start([spec("a-1", SLEEPER, model="one"), spec("a-2", "raise SystemExit(3)", model="two")])
    await output.until(lambda lines: any("The model 'two' is not served any more" in line for _, line in lines))
    assert not fleet.failed.done()


async def test_the_others_go_on_while_one_of_their_kind_stays_up(fleet: Fleet, output: Output) -> None:
    fleet.start([spec("a-1", SLEEPER), spec("a-2", "raise SystemExit(3)")])
    await output.until(lambda lines: any("1 other a goes on" in line for _, line in lines))
    assert not fleet.failed.done()
    assert set(fleet.pids()) == {"a-1"}


async def test_a_command_that_does_not_exist_is_given_up(fleet: Fleet, output: Output) -> None:
    fleet.start([ChildSpec(name="a", service="a", argv=["/no/such/command"])])
    await asyncio.wait_for(fleet.failed, 20)
    assert ("a", "cannot run /no/such/command: No such file or directory") in output.lines


async def test_stop_ends_only_the_named_services_and_does_not_restart_them(fleet: Fleet, output: Output) -> None:
    fleet.start([spec("a", SLEEPER), spec("b", SLEEPER)])
    await output.until_up("a")
    await output.until_up("b")
    await fleet.stop({"a"}, 10)
    assert set(fleet.pids()) == {"b"}
    assert not any("starts again" in line for _, line in output.lines)


async def test_a_child_that_ignores_the_signal_is_killed_after_the_grace(fleet: Fleet, output: Output) -> None:
    fleet.start([spec("a", STUBBORN)])
    await output.until_up("a")
    pid = fleet.pids()["a"]
    await fleet.stop({"a"}, 0.2)
    assert not alive(pid)
    assert ("antiphon", "a did not end within 0 s and is killed") in output.lines


async def test_kill_ends_everything_at_once(fleet: Fleet, output: Output) -> None:
    fleet.start([spec("a", STUBBORN), spec("b", STUBBORN)])
    await output.until_up("a")
    await output.until_up("b")
    started = time.monotonic()
    fleet.kill()
    await fleet.stop({"a", "b"}, 200)
    assert time.monotonic() - started < 100
    assert fleet.killed
    assert fleet.pids() == {}


async def test_stop_during_the_wait_before_a_restart_returns_at_once(fleet: Fleet, output: Output) -> None:
    fleet.start([spec("a", "raise SystemExit(3)")])
    await output.until(lambda lines: any("starts again" in line for _, line in lines))
    await asyncio.wait_for(fleet.stop({"a"}, 10), 5)
    assert fleet.pids() == {}


async def test_output_is_forwarded_with_the_name_and_filtered(fleet: Fleet, output: Output) -> None:
    code = "import os; os.write(1, b'one\\ntwo\\r\\n'); os.write(2, b'hidden\\n\\xff end without newline')"
    fleet.start([spec("a", code, show=lambda line: line != "hidden")])
    await output.until(lambda lines: any(name == "antiphon" for name, _ in lines))
    own = [line for name, line in output.lines if name == "a"][:3]
    assert own == ["one", "two", "\N{REPLACEMENT CHARACTER} end without newline"]


async def test_a_child_gets_its_environment_and_descriptors_and_no_terminal(fleet: Fleet, output: Output) -> None:
    reader, writer = os.pipe()
    code = f"import os; os.write({writer}, os.environ['GREETING'].encode()); print(os.getsid(0) == os.getpid())"
    fleet.start([spec("a", code, environ={"GREETING": "hello"}, pass_fds=(writer,))])
    await output.until(lambda lines: ("a", "True") in lines)
    assert os.read(reader, 5) == b"hello"
    os.close(reader)
    os.close(writer)


def test_children_die_with_a_launcher_that_is_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, TELLS_PID], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline()) for _ in range(2)]
    assert all(alive(pid) for pid in pids)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    wrapper = Path(__file__).resolve().parents[3] / "antiphon" / "supervision" / "child.py"
    argv = [sys.executable, "-I", "-S", str(wrapper), str(os.getppid()), "echo", "started"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such class")
def test_a_child_that_wakes_up_waits_for_a_computing_threads_turn_to_end() -> None:
    wrapper = Path(__file__).resolve().parents[3] / "antiphon" / "supervision" / "child.py"
    tell = "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)"
    argv = [sys.executable, "-I", "-S", str(wrapper), str(os.getpid()), sys.executable, "-c", tell]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "True\n"


@pytest.mark.matrix("R-15")
def test_restarts_come_ever_more_slowly_and_end() -> None:
    policy = RestartPolicy("a")
    waits: list[float] = []
    while isinstance(verdict := policy.after(1, 0.5, float(len(waits))), float):
        waits.append(verdict)
    assert waits == sorted(waits)
    assert 3 <= len(waits) <= 10
    assert isinstance(verdict, Failure)


def test_crashes_after_a_good_start_are_forgiven_for_longer_but_not_for_ever() -> None:
    policy = RestartPolicy("a")
    verdicts = [policy.after(-9, 7.0, 10.0 * n) for n in range(CRASHES_MAX + 1)]
    assert all(isinstance(v, float) and v <= 1.0 for v in verdicts[:-1])
    assert isinstance(verdicts[-1], Failure)
    rare = RestartPolicy("a")
    assert all(isinstance(rare.after(-9, 60.0, 60.0 * n), float) for n in range(200))


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (78, "exit code 78"), (-9, "SIGKILL"), (-99, "signal 99")]
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert describe(code) == words


@given(st.lists(st.binary(max_size=40), max_size=12), st.data())
def test_lines_are_the_same_however_the_bytes_arrive(parts: list[bytes], data: st.DataObject) -> None:
    text = b"\n".join(part.replace(b"\n", b"") for part in parts)
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    lines = Lines()
    got: list[str] = []
    for start, end in zip([0, *at], [*at, len(text)], strict=True):
        got += lines.feed(text[start:end])
    got += lines.rest()
    whole = text.decode("utf-8", "replace").split("\n")
    expected = [line.rstrip("\r") for line in whole[:-1]] + ([whole[-1]] if whole[-1] else [])
    assert got == expected


def test_a_line_without_end_is_cut_and_bounded() -> None:
    lines = Lines()
    got = lines.feed(b"x" * (3 * LINE_BYTES_MAX + 5))
    assert [len(line) for line in got] == [LINE_BYTES_MAX] * 3
    assert lines.feed(b"y\n") == ["xxxxxy"]
