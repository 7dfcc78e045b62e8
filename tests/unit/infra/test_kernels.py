"""The compile gate: the record of every kernel is of the code that is there, and compiling gives what is recorded.

Compiling everything takes minutes (`make kernels`): here only what has changed since the record was made, and a sample.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="a torch without CUDA brings no Triton")

ROOT = Path(__file__).resolve().parents[3]
WANTED = (ROOT / "infra/checks/kernels/triton.txt").read_text().strip().removeprefix("triton==")

pytestmark = [
    pytest.mark.skipif(triton.__version__ != WANTED, reason=f"the budgets are those of Triton {WANTED}"),
    pytest.mark.timeout(600),
]


def gate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argv = [sys.executable, "-m", "infra.checks.kernels.gate", *arguments]
    return subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True)


def test_every_kernel_keeps_its_budget_on_three_targets() -> None:
    done = gate("--changed", "--jobs=2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_a_sample_that_is_compiled_anew_is_what_is_recorded(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argv = [sys.executable, "-m", "infra.checks.kernels.gate", "--only=attention, Qwen3 0.6B"]
    # Nothing that was compiled before helps.
    environ["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "12 kernels compiled" in done.stdout


def test_the_table_has_a_line_for_every_budget() -> None:
    budgets = json.loads((ROOT / "infra/checks/kernels/budgets.json").read_text())
    lines = (ROOT / "docs/contributing/kernels.md").read_text().splitlines()
    kernels = {" | ".join(key.split(" | ")[:2]) for key in budgets}
    assert sum(any(line.startswith(f"| {kernel} |") for line in lines) for kernel in kernels) == len(kernels)
