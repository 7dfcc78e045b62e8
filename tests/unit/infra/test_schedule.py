"""How tests are divided among processes: files and packages stay whole, and what takes longest comes first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import schedule

PLUGINS = 'pytest_plugins = ("tests.support.schedule",)\n'


def test_tests_of_a_file_or_of_a_package_stay_together() -> None:
    assert schedule.unit_of("tests/model/test_parity.py::test_it[a::b/c.py]") == "tests/model/test_parity.py"
    assert schedule.unit_of("tests/system/api/test_beams.py::TestIt::test_it") == "tests/system/api"


def test_what_takes_longest_is_there_and_comes_first() -> None:
    assert not [unit for unit in schedule.LONGEST if not (schedule.ROOT / unit).exists()]
    asked = [f"{unit}::test" if unit.endswith(".py") else f"{unit}/test_x.py::test" for unit in schedule.LONGEST]
    assert sorted([*reversed(asked), "tests/unit/infra/test_schedule.py::test"], key=schedule.rank) == [
        *asked,
        "tests/unit/infra/test_schedule.py::test",
    ]


@pytest.mark.parametrize(
    ("cores", "gib", "count"), [(1, 64, 2), (2, 64, 3), (3, 64, 4), (64, 64, 4), (64, 9, 2), (8, 3, 1)]
)
def test_there_are_as_many_processes_as_cores_and_memory_allow(
    cores: int, gib: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": gib * 2**18}[name])
    assert schedule.pytest_xdist_auto_num_workers() == count


@pytest.mark.parametrize("processes", ["0", "2"])
def test_each_test_runs_once_and_a_file_in_one_process(processes: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGINS)
    for name in ("a", "b", "c"):
        body = "import os\nfrom pathlib import Path\n" + "".join(
            f"def test_{number}():\n    with open(Path(__file__).with_suffix('.ran'), 'a') as file:\n"
            f"        print({number}, os.getpid(), file=file)\n"
            for number in range(4)
        )
        (tmp_path / f"test_{name}.py").write_text(body)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", processes]
    done = subprocess.run(argv, cwd=tmp_path, env={"PYTHONPATH": str(schedule.ROOT)}, capture_output=True, text=True)
    assert "12 passed" in done.stdout, done.stdout
    for name in ("a", "b", "c"):
        lines = (tmp_path / f"test_{name}.ran").read_text().split()
        assert lines[::2] == ["0", "1", "2", "3"]
        assert len(set(lines[1::2])) == 1
