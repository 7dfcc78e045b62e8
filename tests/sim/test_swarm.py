"""Whole societies under several random faults at once, one for each seed (`make sim` runs more of them)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.run import make_models, run_seeds

SEEDS = 30


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> tuple[str, ...]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.matrix("R-02", "R-11", "R-14", "B-09", "B-10", "P-03", "P-07")
@pytest.mark.swarm
@pytest.mark.timeout(600)
def test_every_request_of_a_swarm_ends_once_with_the_reference_output(model_dirs):
    failed = [result for result in run_seeds(range(SEEDS), os.cpu_count() or 1, model_dirs) if result.violations]
    seeds = ", ".join(str(result.seed) for result in failed)
    first = failed[0] if failed else None
    assert first is None, f"failed seeds: {seeds}; make sim ARGS='--seed {first.seed}'\n{first.report()}"


@pytest.mark.swarm
def test_a_seed_is_replayed_bit_for_bit_whatever_the_hash_seed_of_the_interpreter(model_dirs):
    program = (
        "import sys; from tests.sim.plan import draw_plan; from tests.sim.swarm import run_plan\n"
        "print([run_plan(draw_plan(seed), tuple(sys.argv[1:])).fingerprint for seed in (3, 4, 5)])"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program, *model_dirs],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert len(set(printed[0].split(", "))) == 3
