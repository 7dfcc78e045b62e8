"""Lanes are independent: the core works without each optional one, if its file and its lines in `LANES` are removed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.services.engine.core.lanes import LANES

ROOT = Path(__file__).parents[4]
OPTIONAL = {"canary": "CanaryLane", "idle": "IdleLane", "large_head": "LargeHeadLane"}
RUN = """
import importlib, pkgutil
import antiphon.services.engine.core as package
from tests.unit.engine.core.factories import make_core, prompt_of, spec, step

assert package.__path__[0].startswith({root!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
for chunked in (True, False):
    core = make_core(num_blocks=8, chunked=chunked, num_speculative_tokens=2)
    for number in range(6):
        core.add(spec(str(number), prompt_of(7, 100 * number), max_tokens=6))
    for _ in range(60):
        step(core)
    assert not core.sequences and core.counters().preemptions
print(len(core.scheduler.lanes))
"""


@pytest.mark.parametrize("removed", [*([name] for name in OPTIONAL), list(OPTIONAL)], ids="-".join)
def test_the_core_works_without_an_optional_lane(removed: list[str], tmp_path: Path) -> None:
    for folder in ("antiphon/", "antiphon/services", "antiphon/services/engine"):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / folder / "__init__.py", tmp_path / folder)
    (tmp_path / "antiphon/shared").symlink_to(ROOT / "shared")
    core = tmp_path / "antiphon/services/engine/core"
    shutil.copytree(ROOT / "services/engine/core", core, ignore=shutil.ignore_patterns("__pycache__"))
    package = core / "lanes/__init__.py"
    for name in removed:
        (core / f"lanes/{name}.py").unlink()
        lines = package.read_text().splitlines(keepends=True)
        package.write_text("".join(line for line in lines if OPTIONAL[name] not in line))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", RUN.format(root=str(tmp_path))]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(LANES) - len(removed)
