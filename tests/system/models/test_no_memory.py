"""A start of the container's command that does not fit into memory: exit code 78, and what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import make_model

pytestmark = [pytest.mark.system, pytest.mark.nats]
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.spec("S-DEP-023", "S-DEP-024")
def test_a_start_that_does_not_fit_ends_with_78_and_the_measures_as_variables(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", num_hidden_layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2_000_000}))
    environ = {**os.environ, "MODEL_PATH": str(tmp_path), "MAX_MODEL_LEN": "1000000"}
    flags = ("--port=0", "--device=cpu", "--max-num-seqs=2", "--kv-cache-memory-gb=0.05")
    argv = [sys.executable, "-m", "antiphon", "run", *flags]
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=60)
    told = done.stdout + done.stderr
    assert done.returncode == 78, told
    assert "less than the context of 1000000 tokens" in told
    for measure in ("QUANTIZATION=ifq", "MAX_MODEL_LEN=4096", "GPU_MEMORY_UTILIZATION=0.95", "--kv-cache-memory-gb"):
        assert measure in told
    assert "--enforce-eager" not in told.partition("Take one of these measures")[2]
