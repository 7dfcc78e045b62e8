"""Every module of the benchmarks can be imported: most are only run by hand, after changes to what they use."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_module_can_be_imported() -> None:
    files = sorted(path.relative_to(ROOT) for path in (ROOT / "bench").rglob("*.py") if path.name != "__init__.py")
    names = [".".join(path.with_suffix("").parts) for path in files]
    assert "bench.engine.lookahead" in names
    program = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
