"""The launcher's private directory."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from antiphon.launch.run_directory import run_directory


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_its_owner_can_enter_and_it_is_gone_afterwards(tmp_path: Path) -> None:
    with run_directory(tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "file").write_text("x")
    assert not path.exists()


def test_what_a_killed_launcher_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = tmp_path / f"antiphon-{ended_pid()}-abcd"
    live = tmp_path / f"antiphon-{os.getpid()}-abcd"
    other = tmp_path / "antiphon-notes"
    for each in (dead, live, other):
        each.mkdir()
    with run_directory(tmp_path):
        assert not dead.exists()
        assert live.exists()
        assert other.exists()
