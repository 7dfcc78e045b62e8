"""The parts of the check on a GPU that need none: limits, results, comparisons."""

import os
import sys
import time
from pathlib import Path

import pytest

from bench.gpu.parity import compare
from bench.gpu_check import Check, last_json, run_limited


@pytest.mark.parametrize(
    ("output", "found"),
    [('loading\n{"ms": 1}\n', {"ms": 1}), ("", None), ("done", None), ("[1]", None), ('{"ms": 1}\nbye', None)],
)
def test_a_part_says_what_it_found_in_its_last_line(output: str, found: object) -> None:
    assert last_json(output) == found


def test_a_part_that_takes_too_long_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    program = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(ended)!r}).touch(), sys.exit()))\n"
        "print('started', flush=True)\n"
        "time.sleep(600)\n"
    )
    started = time.monotonic()
    code, output, _ = run_limited([sys.executable, "-c", program], dict(os.environ), 5.0)
    assert (code, output) == (None, "started\n")
    assert ended.exists()
    assert time.monotonic() - started < 100


def test_a_part_that_fails_is_noted_and_the_next_one_runs(tmp_path: Path) -> None:
    check = Check(tmp_path / "results.json", time.monotonic() + 1000, dict(os.environ))
    assert check.part("broken", "bench.no_such_module", limit_s=60) is None
    assert "No module named" in check.results["broken"]["failed"]
    check.deadline = time.monotonic()
    assert check.part("late", "bench.no_such_module", limit_s=60) is None
    assert "missing" in check.results["late"]


def test_answers_are_compared_up_to_where_they_part() -> None:
    ours = {"a": ([1, 2, 3, 4], [-1.0, -1.0, -1.0, -9.0]), "b": ([5, 6], [-1.0, -1.0])}
    theirs = {"a": ([1, 2, 7, 4], [-1.0, -1.02, -1.01, -1.0]), "b": ([5, 6], [-1.0, -1.0])}
    assert compare(ours, ours) == {"same_tokens_percent": 100.0, "logprob_difference": 0.0}
    assert compare(ours, theirs) == {"same_tokens_percent": 66.7, "logprob_difference": 0.02}
