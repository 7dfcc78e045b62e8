"""Temporary directories of files: those of killed processes are removed, those of living ones are not."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from antiphon.services.gateway.guests.files import temporary
from antiphon.shared import limits

OWNER = """
from antiphon.services.gateway.guests.files import temporary
path = temporary.make()
(path / "file-1").write_text("data")
print(path, flush=True)
input()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner(place: Path) -> tuple["subprocess.Popen[str]", Path]:
    environ = {**os.environ, "TMPDIR": str(place)}
    started = subprocess.Popen(
        [sys.executable, "-c", OWNER], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    return started, Path(started.stdout.readline().strip())


def test_directories_of_killed_processes_are_removed_and_those_of_living_ones_are_not(place: Path):
    killed, gone = owner(place)
    living, kept = owner(place)
    assert gone.parent == kept.parent == place
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    unmarked = place / "antiphon-files-older"
    unmarked.mkdir()
    (place / "antiphon-files-link").symlink_to(kept)
    assert temporary.remove_leftovers() == 1
    assert not gone.exists()
    assert (kept / "file-1").read_text() == "data"
    assert unmarked.exists()
    living.communicate("\n")
    assert living.returncode == 0
    assert not kept.exists()


def test_at_most_so_many_are_removed_at_once(place: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(3):
        (place / f"antiphon-files-{number}").mkdir()
        (place / f"antiphon-files-{number}" / ".owned").touch()
    monkeypatch.setattr(limits, "TEMPORARY_LEFTOVERS_MAX", 2)
    assert temporary.remove_leftovers() == 2
    assert temporary.remove_leftovers() == 1
    assert list(place.iterdir()) == []
