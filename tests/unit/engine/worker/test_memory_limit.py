"""The memory that start-up plans is never exceeded, whatever steps come: in a process of its own, as served."""

import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.shared.config import EngineSettings
from antiphon.shared.models.model_files import model_directory
from tests.unit.engine.conftest import Checkpoint

pytestmark = pytest.mark.timeout(900)  # a minute of computing, on a busy machine many
MIB = 2**20


def run(model: Path, backend: str, *flags: int) -> tuple[int, int, int]:
    command = [sys.executable, "-m", "tests.unit.engine.worker.largest_steps", str(model), backend, *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    planned, peak, cache = map(int, done.stdout.split())
    return planned, peak, cache


@pytest.mark.spec("S-SRV-040")
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_plan_holds_and_has_little_to_spare(backend: str) -> None:
    planned, peak, cache = run(model_directory(EngineSettings()), backend, 64, 512, 1, 0)
    assert cache > 100 * MIB
    assert peak <= planned
    if backend == "auto":
        assert planned - peak < cache, "a plan without the cache would pass"


@pytest.mark.spec("S-SRV-040")
def test_steps_with_guesses_and_whole_prompts_stay_within_the_plan(checkpoint: Checkpoint) -> None:
    model = checkpoint(vocab_size=10_000, max_position_embeddings=4000)
    planned, peak, _ = run(model, "torch", 12, 4000, 0, 4)
    assert peak <= planned
