"""The program that waits to become a service, with modules of the standard library in place of a service."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.shared.actors.standby import ACTIVE, MODULE, STANDBY, stands_by

TELLS = "services_like"
TELLS_CODE = (
    "import os, sys\n"
    "print(sys.argv[1:], __name__, os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev, 'json' in sys.modules,\n"
    "      open('/proc/self/comm').read().strip(), flush=True)\n"
    "sys.exit(7)\n"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / TELLS).mkdir()
    (tmp_path / TELLS / "__init__.py").touch()
    (tmp_path / TELLS / "__main__.py").write_text(TELLS_CODE)
    return tmp_path


def start(directory: Path, words: Sequence[str]) -> "subprocess.Popen[str]":
    environ = {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', Path.cwd())}"}
    argv = [sys.executable, "-m", MODULE, *words]
    return subprocess.Popen(argv, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def until_it_waits(process: "subprocess.Popen[str]") -> None:
    deadline, comm = time.monotonic() + 60, Path(f"/proc/{process.pid}/comm")
    while comm.read_text().strip() != STANDBY:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_standby_becomes_the_service_when_it_gets_a_line(directory: Path) -> None:
    with start(directory, ["json,csv", TELLS, "--flag=1"]) as process:
        until_it_waits(process)
        words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        assert stands_by(words, STANDBY)
        assert not stands_by(words, ACTIVE)
        output, _ = process.communicate("\n", timeout=60)
    assert output == f"['--flag=1'] __main__ True True {ACTIVE}\n"
    assert process.returncode == 7


def test_a_standby_that_is_not_needed_ends_without_the_service(directory: Path) -> None:
    with start(directory, ["json", TELLS]) as process:
        output, _ = process.communicate("", timeout=60)
    assert (output, process.returncode) == ("", 0)


def test_a_process_that_is_only_starting_to_wait_stands_by_and_an_ordinary_one_does_not() -> None:
    assert stands_by(["python", "-m", MODULE, "json", "antiphon.services.engine"], "python")
    assert not stands_by(["python", "-m", "antiphon.services.engine"], "python")
