"""The checks of the source: each finds what it is for, and passes what is right."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).resolve().parents[3] / "infra" / "checks"


def check(root: Path, folder: str, source: str) -> subprocess.CompletedProcess[str]:
    path = root / folder / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return run("house_limits.py", str(root))


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(CHECKS / script), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def function(lines: int, comment: str = "") -> str:
    return f"def long():  {comment}\n" + "    x = 1\n" * (lines - 1)


def test_a_function_of_60_lines_passes_and_one_of_61_does_not(tmp_path: Path) -> None:
    assert check(tmp_path / "a", "services", function(60)).returncode == 0
    done = check(tmp_path / "b", "services", function(61))
    assert done.returncode == 1
    assert "services/module.py:1 long: 61 lines" in done.stdout


def test_a_long_function_with_a_reason_passes(tmp_path: Path) -> None:
    assert check(tmp_path, "tests", function(90, "# long: a table in code")).returncode == 0


def test_a_file_over_600_lines_does_not_pass(tmp_path: Path) -> None:
    assert check(tmp_path / "a", "shared", "x = 1\n" * 600).returncode == 0
    assert "601 lines" in check(tmp_path / "b", "shared", "x = 1\n" * 601).stdout
    (tmp_path / "a" / "shared" / "native.h").write_text("int x;\n" * 601)
    assert "shared/native.h: 601 lines" in run("house_limits.py", str(tmp_path / "a")).stdout


def test_a_folder_with_more_than_14_modules_does_not_pass(tmp_path: Path) -> None:
    folder = tmp_path / "services" / "engine"
    folder.mkdir(parents=True)
    for number in range(14):
        (folder / f"module_{number}.py").write_text("")
    assert run("house_limits.py", str(tmp_path)).returncode == 0
    (folder / "__init__.py").write_text("")
    done = run("house_limits.py", str(tmp_path))
    assert done.returncode == 1
    assert "services/engine: 15 modules, more than 14" in done.stdout


def test_a_class_with_more_than_25_methods_does_not_pass(tmp_path: Path) -> None:
    methods = "".join(f"    def method_{number}(self): ...\n" for number in range(25))
    assert check(tmp_path / "a", "services", f"class One:\n{methods}").returncode == 0
    done = check(tmp_path / "b", "services", f"class One:\n{methods}    @property\n    def more(self): ...\n")
    assert done.returncode == 1
    assert "services/module.py:1: One has 26 methods, more than 25" in done.stdout


FIVE = "    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n"


@pytest.mark.parametrize(
    ("head", "passes"),
    [
        ("@dataclass(frozen=True)\nclass One:", False),
        ("class One(msgspec.Struct, frozen=True):", False),
        ("@dataclass(frozen=True, kw_only=True)\nclass One:", True),
        ("class One(Message, kw_only=True):", True),
        ("@dataclass\nclass One:  # positional: a row of a table", True),
        ("class One(Protocol):", True),
    ],
)
def test_what_has_five_fields_is_built_by_keyword(tmp_path: Path, head: str, passes: bool) -> None:
    assert (check(tmp_path, "services", f"{head}\n{FIVE}").returncode == 0) == passes


@pytest.mark.matrix("S-13")
@pytest.mark.parametrize(
    "source",
    [
        "import pickle\n",
        "from pickle import loads\n",
        "import torch\ntorch.load('f')\n",
        "eval('1')\n",
        "exec('1')\n",
        "import yaml\nyaml.load(text)\n",
        "import subprocess\nsubprocess.run('ls', shell=True)\n",
        "import os\nos.system('ls')\n",
    ],
)
def test_the_product_runs_nothing_that_it_reads(tmp_path: Path, source: str) -> None:
    assert check(tmp_path / "a", "services", source).returncode == 1
    assert check(tmp_path / "b", "tests", source).returncode == 0


@pytest.mark.parametrize(
    "source",
    ["import yaml\nyaml.load(text, Loader=yaml.SafeLoader)\n", "model.eval()\n", "run('ls', shell=False)\n"],
)
def test_what_only_looks_like_it_passes(tmp_path: Path, source: str) -> None:
    assert check(tmp_path, "services", source).returncode == 0


def test_weights_are_read_with_the_restricted_reader_and_in_one_file_only(tmp_path: Path) -> None:
    restricted = "import torch\ntorch.load('f', weights_only=True)\n"
    assert check(tmp_path / "a", "services", restricted).returncode == 1
    for source, code in ((restricted, 0), ("import torch\ntorch.load('f', weights_only=False)\n", 1)):
        folder = tmp_path / str(code) / "services" / "engine" / "worker" / "loading"
        folder.mkdir(parents=True)
        (folder / "checkpoint.py").write_text(source)
        assert check(tmp_path / str(code), "tests", "").returncode == code
