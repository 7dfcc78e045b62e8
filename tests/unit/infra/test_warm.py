"""A process that is forked from a warm one is what an executed one would be."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and the adoption of orphans")
EXECUTED = {"NOT_ANTIPHON": "a variable that a library might read when it is imported"}
TERMINATES = 1 << (signal.SIGTERM - 1)
PASSED = 200


def facts(pid: int) -> dict[str, object]:
    """What others see of a process that handles signals."""
    directory, deadline = Path(f"/proc/{pid}"), time.monotonic() + 60
    while True:
        lines = (line.split(":\t") for line in (directory / "status").read_text().splitlines())
        status = {line[0]: line[1] for line in lines}
        if int(status["SigCgt"], 16) & TERMINATES:
            break
        assert time.monotonic() < deadline
        time.sleep(0.02)
    fields = (directory / "stat").read_text().rpartition(")")[2].split()
    return {
        "parent": int(fields[1]) == os.getpid(),
        "group and session": (int(fields[2]) == pid, int(fields[3]) == pid),
        "command line": (directory / "cmdline").read_text().rstrip("\0").split("\0"),
        "directory": (directory / "cwd").readlink(),
        "standard descriptors": [(directory / "fd" / str(number)).readlink().name.split(":")[0] for number in range(3)],
        "passed": (directory / "fd" / str(PASSED)).exists(),
        **{name: status[name] for name in ("Uid", "Gid", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Cpus_allowed")},
    }


def seen(start: Callable[..., subprocess.Popen[bytes]], environ: Mapping[str, str], words: list[str]) -> object:
    with start(words, env={**os.environ, **environ}) as process:
        try:
            is_forked = "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
            found = facts(process.pid)
        finally:
            process.kill()
    assert is_forked == (environ == {})
    return found, process.returncode


@pytest.mark.parametrize("in_session", [True, False])
def test_a_forked_service_is_like_an_executed_one(tmp_path: Path, in_session: bool) -> None:
    words = [sys.executable, "-m", "antiphon.services.tokenizer", "--nats=nats://127.0.0.1:1", f"--model={tmp_path}"]

    def start(argv: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        os.dup2(0, PASSED)
        try:
            return subprocess.Popen(
                argv, env=env, pass_fds=[PASSED], stderr=subprocess.PIPE, start_new_session=in_session
            )
        finally:
            os.close(PASSED)

    assert seen(start, {}, words) == seen(start, EXECUTED, words)


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["serve", "--no-such-option"],
        ["serve", "--model=/nowhere"],
        ["top", "--server=http://127.0.0.1:1"],
    ],
)
def test_a_forked_command_prints_and_returns_what_an_executed_one_does(words: list[str]) -> None:
    argv = [sys.executable, "-m", "antiphon", *words]
    ways = [
        subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
        for environ in ({}, EXECUTED)
    ]
    assert told(ways[0]) == told(ways[1])
    assert all(told(ways[0]))


def told(done: "subprocess.CompletedProcess[str]") -> tuple[str, list[str]]:
    """The exit code and what was printed, without the servers of this machine: other tests start and end theirs."""
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    servers = "Servers on this machine: ", "Start one with "
    return f"ended with {done.returncode}", [line for line in lines if not line.strip().startswith(servers)]
